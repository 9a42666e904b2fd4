"""QK-norm as a module, for every dialect.

Shapes: B batch, T tokens, H heads (Hq query heads, Hk key heads), D head width.
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
    """RMSNorm of q and k, followed by RoPE (or preceded by it, in some dialects). V is not touched.

    A state dict states in `gain_offset` what a stored parameter w means: 0 for the gain w, and 1 for the
    gain 1 + w. Loading raises an error if the state dict and the module differ in this. A state dict
    without `gain_offset`, such as one of another project, is taken to hold gains w.

    Args:
        num_heads: number of query heads, Hq.
        num_kv_heads: number of key heads, Hk.
        head_dim: width of a head, D.
        dialect: the variant of QK-norm. The default has a gain for each head, `[Hq, D]` and `[Hk, D]`,
            and comes before RoPE.
        device: device of the gains.

    Attributes:
        q_gain: the stored gain of q, whose shape the dialect decides; None for a dialect without gains.
            It is fp32, whatever the model is cast to (fp64 after `double()`).
        k_gain: the stored gain of k, likewise.
        gain_offset: the offset of the dialect as a tensor `[]`.
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
        # Without gains there is no offset to store in a state dict.
        offset = torch.empty((), dtype=torch.float32, device=device)
        self.register_buffer("gain_offset", offset, persistent=dialect.gain != "none")
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set all effective gains to 1."""
        for gain in (self.q_gain, self.k_gain):
            if gain is not None:
                torch.nn.init.constant_(gain, 1.0 - self.dialect.offset)
        torch.nn.init.constant_(self.gain_offset, self.dialect.offset)

    def effective_gains(self) -> tuple[Tensor, Tensor]:
        """Return the factors of the normalised q and k, `[Hq, D]` and `[Hk, D]`, differentiable."""
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
        """Normalise and rotate q and k, or return the effective gains if q and k are None.

        The gains are available this way because a wrapper that shards parameters, such as FSDP, gathers
        them only while `forward` runs.

        Args:
            q: `[B, Hq, Tq, D]`; fp16, bf16, fp32 or fp64.
            k: `[B, Hk, Tk, D]` in q's dtype.
            rope: the rotary table of all Tk tokens, or None. The queries are the last Tq tokens.

        Returns:
            q_hat `[B, Hq, Tq, D]` and k_hat `[B, Hk, Tk, D]`, computed in fp32 (fp64 for fp64 input) and
            rounded once to the dtype of q and k. Without q and k, copies of the effective gains
            `[Hq, D]` and `[Hk, D]`.

        Raises:
            ValueError: the shapes do not fit, or eps is too small for the dtype.
        """
        q_gain, k_gain = self.effective_gains()
        if q is None or k is None:
            # The wrapper frees the parameters when this returns, so the caller gets copies.
            return q_gain.clone(), k_gain.clone()
        checks.check_qk(q, k, q_gain, k_gain, self.dialect.eps, rope)
        q_rope = None if rope is None else rope.last(q.shape[2])
        return self.normalize(q, q_gain, q_rope), self.normalize(k, k_gain, rope)

    def normalize(self, x: Tensor, gain: Tensor, rope: Rope | None = None) -> Tensor:
        """Normalise and rotate q or k alone, without checking the arguments.

        Args:
            x: q or k, `[B, H, T, D]`.
            gain: its effective gain `[H, D]`.
            rope: the rotary table of its T tokens, or None.

        Returns:
            `[B, H, T, D]` in the dtype of x.
        """
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
                centered=dialect.centered,
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
        key, offset = f"{prefix}gain_offset", self.dialect.offset
        gain = next((state_dict[prefix + n] for n in self.marked if prefix + n in state_dict), None)
        mark = state_dict.get(key)
        # The offset is compared with the dialect and not with the buffer, because a distributed
        # checkpoint has been read into the buffers of the module before this is called.
        if isinstance(gain, Tensor) and not (isinstance(mark, Tensor) and mark.is_meta):
            found = 0.0 if mark is None else float(mark)
            if found != offset:
                reason = (
                    f"the state dict has no {key}, so that its gains mean w"
                    if mark is None
                    else f"{key} of the state dict says that its gains mean {_meaning(found)}"
                )
                error_msgs.append(
                    f"{reason}, but those of this module mean {_meaning(offset)}: build the module with "
                    f"NormDialect(offset={found:g}), or convert the gains of the state dict to the form "
                    f"{_meaning(offset)} and set its {key} to torch.tensor({offset})."
                )
                return
            if mark is None:
                state_dict[key] = torch.zeros((), dtype=torch.float32, device=gain.device)
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )

    def extra_repr(self) -> str:
        """Return heads, width and dialect, for `print`."""
        return f"q={self.heads['q']}, k={self.heads['k']}, head_dim={self.head_dim}, {self.dialect}"


def _meaning(offset: float) -> str:
    return f"{offset:g} + w" if offset else "w"
