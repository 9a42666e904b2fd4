"""QK-norm as a module, in every dialect.

Shapes: B batch, T tokens, H heads, D head width.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import Parameter

from qknorm import checks, spec
from qknorm.nn.marks import GAIN, MarkedModule
from qknorm.ops.norm_rope import rms_normalize, rotate
from qknorm.spec import NormDialect, Rope


class QKNorm(MarkedModule):
    """RMSNorm of q and k, then (or, in some dialects, after) RoPE. V is not its business.

    Args:
        num_heads: query heads Hq.
        num_kv_heads: key heads Hk.
        head_dim: D.
        dialect: the variant; the default is a gain per head, `[Hq, D]` and `[Hk, D]`, before RoPE.

    Attributes:
        q_gain, k_gain: stored gains, fp32, shaped by the dialect; None for a dialect without.
    """

    q_gain: Parameter | None
    k_gain: Parameter | None
    _where: Tensor

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
        # Where gains that are not stored are made; a buffer, so that it follows the module.
        self.register_buffer("_where", torch.empty(0, device=device), persistent=False)
        for which, heads in self.heads.items():
            size = dialect.gain_size(heads, head_dim)
            gain = None
            if size is not None:
                fill = 1.0 - dialect.offset
                gain = Parameter(torch.full(size, fill, dtype=torch.float32, device=device))
            self.add_marked(f"{which}_gain", gain, GAIN, offset=dialect.offset)

    def reset_parameters(self) -> None:
        """Back to an effective gain of 1."""
        for gain in (self.q_gain, self.k_gain):
            if gain is not None:
                torch.nn.init.constant_(gain, 1.0 - self.dialect.offset)

    def effective_gains(self) -> tuple[Tensor, Tensor]:
        """What the normalised q and k are multiplied by, `[Hq, D]` and `[Hk, D]`, differentiable."""
        return self._effective("q"), self._effective("k")

    def _effective(self, which: str) -> Tensor:
        shape = (self.heads[which], self.head_dim)
        stored = getattr(self, f"{which}_gain")
        if stored is None:
            return torch.ones(shape, device=self._where.device)
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

    def extra_repr(self) -> str:
        """Heads, width and dialect."""
        return f"q={self.heads['q']}, k={self.heads['k']}, head_dim={self.head_dim}, {self.dialect}"
