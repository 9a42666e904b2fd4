"""QK-norm as a module, in every dialect.

Shapes: B batch, T tokens, H heads, D head width.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from qknorm import checks, spec
from qknorm.nn.marks import GAIN, MarkedModule
from qknorm.ops.norm_rope import rms_normalize, rotate
from qknorm.spec import NormDialect, Rope


class QKNorm(MarkedModule):
    """RMSNorm of q and k, then (or, in some dialects, after) RoPE. V is not its business.

    A state dict says in `gain_offset` what its gains mean: a gain of w (0), or of 1 + w (1). A state
    dict whose gains mean something else than those of the module is refused. One without `gain_offset`,
    such as that of another project, holds gains of w.

    Args:
        num_heads: query heads Hq.
        num_kv_heads: key heads Hk.
        head_dim: D.
        dialect: the variant; the default is a gain per head, `[Hq, D]` and `[Hk, D]`, before RoPE.
        device: of the gains.

    Attributes:
        q_gain, k_gain: stored gains, shaped by the dialect, fp32 whatever the model is cast to (fp64
            after `double()`); None for a dialect without.
        gain_offset: the dialect's offset as a tensor `[]`.
    """

    q_gain: Parameter | None
    k_gain: Parameter | None
    gain_offset: Tensor

    def __init__(
        self,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        dialect: NormDialect = NormDialect(),
        *,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.heads = {"q": num_heads, "k": num_kv_heads}
        self.head_dim = head_dim
        self.dialect = dialect
        for which, heads in self.heads.items():
            size = dialect.gain_size(heads, head_dim)
            empty = None if size is None else torch.empty(size, dtype=torch.float32, device=device)
            gain = None if empty is None else Parameter(empty)
            self.add_marked(f"{which}_gain", gain, GAIN, offset=dialect.offset)
        # A state dict without gains has nothing to say of them.
        offset = torch.empty((), dtype=torch.float32, device=device)
        self.register_buffer("gain_offset", offset, persistent=dialect.gain != "none")
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Back to an effective gain of 1."""
        for gain in (self.q_gain, self.k_gain):
            if gain is not None:
                torch.nn.init.constant_(gain, 1.0 - self.dialect.offset)
        torch.nn.init.constant_(self.gain_offset, self.dialect.offset)

    def effective_gains(self) -> tuple[Tensor, Tensor]:
        """What the normalised q and k are multiplied by, `[Hq, D]` and `[Hk, D]`, differentiable."""
        return self._effective("q"), self._effective("k")

    def _effective(self, which: str) -> Tensor:
        shape = (self.heads[which], self.head_dim)
        stored = getattr(self, f"{which}_gain")
        if stored is None:
            return self.gain_offset.new_ones(shape)
        gain = stored if stored.shape == (self.head_dim,) else stored.view(shape)
        return (gain + self.dialect.offset if self.dialect.offset else gain).expand(shape)

    def forward(
        self, q: Tensor | None = None, k: Tensor | None = None, rope: Rope | None = None
    ) -> tuple[Tensor, Tensor]:
        """Normalise and rotate q `[B, Hq, T, D]` and k `[B, Hk, T, D]`; fp32, rounded once.

        Without q and k the effective gains: where a wrapper shards parameters, they are whole only while
        this runs.

        Raises ValueError if the shapes, or eps for this dtype, do not fit.
        """
        q_gain, k_gain = self.effective_gains()
        if q is None or k is None:
            # Copies, since the wrapper frees the parameters when this returns.
            return q_gain.clone(), k_gain.clone()
        checks.check_qk(q, k, q_gain, k_gain, self.dialect.eps, rope)
        q_rope = None if rope is None else rope.last(q.shape[2])
        return self.normalize(q, q_gain, q_rope), self.normalize(k, k_gain, rope)

    def normalize(self, x: Tensor, gain: Tensor, rope: Rope | None = None) -> Tensor:
        """q or k alone, `[B, H, T, D]`, with its gain and a table of T positions; unchecked."""
        dialect = self.dialect
        with torch.autocast(x.device.type, enabled=False):
            wide = x.to(spec.compute_dtype(x.dtype))
            if rope is not None and dialect.order == "after_rope":
                wide = rotate(wide, rope)
            wide = rms_normalize(
                wide,
                None if dialect.gain == "none" else gain,
                eps=dialect.eps,
                statistic=dialect.statistic,
                eps_place=dialect.eps_place,
            )
            if rope is not None and dialect.order == "before_rope":
                wide = rotate(wide, rope)
            return wide.to(x.dtype)

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        key, own = f"{prefix}gain_offset", self.dialect.offset
        gain = next((state_dict[prefix + n] for n in self.marked if prefix + n in state_dict), None)
        mark = state_dict.get(key)
        # Compared with the dialect, not with the buffer: a distributed checkpoint is read into the
        # module's own tensors before this is called.
        if isinstance(gain, Tensor) and not (isinstance(mark, Tensor) and mark.is_meta):
            found = 0.0 if mark is None else float(mark)
            if found != own:
                says = (
                    f"the state dict has no {key}, so that its gains mean w"
                    if mark is None
                    else f"{key} of the state dict says that its gains mean {_meaning(found)}"
                )
                error_msgs.append(
                    f"{says}, but this module's mean {_meaning(own)}: build it with "
                    f"NormDialect(offset={found:g}), or bring the gains of the state dict into the form "
                    f"{_meaning(own)} and set its {key} to torch.tensor({own})."
                )
                return
            if mark is None:
                state_dict[key] = torch.zeros((), dtype=torch.float32, device=gain.device)
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )

    def extra_repr(self) -> str:
        """Heads, width and dialect."""
        return f"q={self.heads['q']}, k={self.heads['k']}, head_dim={self.head_dim}, {self.dialect}"


def _meaning(offset: float) -> str:
    return f"{offset:g} + w" if offset else "w"
