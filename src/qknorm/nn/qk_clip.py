"""QK-clip: scale down the projections of heads whose largest logit has passed a limit.

The rule is that of MuonClip (Kimi K2, arXiv 2507.20534, sec. 2.1): a head whose largest logit is s > tau
gets the factor tau / s. Where a query head has a key head of its own, both of their projections are
multiplied by the square root of the factor. Key heads that several query heads share stay as they are,
and the queries take the whole factor, so that no head is changed for the sake of another.

Shapes: Hq query heads, Hk key heads, D head width, C model width.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from qknorm.nn.attention import Attention
from qknorm.nn.qk_norm import QKNorm


class HeadRows(NamedTuple):
    """The rows of a parameter that belong to the heads of q or of k.

    Attributes:
        parameter: a weight `[rows, ...]`, a bias or a gain. Its first axis holds the heads in order.
        heads: how many heads it holds; 1 for a gain that all heads share.
        width: rows of each head.
        start: the first row of the first head.
        offset: 1 for a gain that is stored as w and means 1 + w, else 0.
    """

    parameter: Parameter
    heads: int
    width: int
    start: int = 0
    offset: float = 0.0


class Projections(NamedTuple):
    """What a clip scales in one layer.

    Attributes:
        q: the rows of q; weight and bias, or the gain of its norm.
        k: the rows of k, likewise.
    """

    q: Sequence[HeadRows]
    k: Sequence[HeadRows]


@torch.no_grad()
def qk_clip_(
    model: nn.Module,
    max_logit: Mapping[str, Sequence[float]],
    tau: float,
    *,
    projections: Mapping[str, Projections] | None = None,
) -> dict[str, Tensor]:
    """Scale q and k of each head in place so that its largest logit is at most tau on the same inputs.

    Call it after `optimizer.step()`, with the maxima of that step:

        for record in monitor.step():  # Monitor.attach(model, every=1)
            qk_clip_(model, record.max_logits, tau=100.0)

    A record is merged over ranks, so every rank applies the same factors and replicas stay equal to the
    bit. Weights that FSDP2 or tensor parallelism have sharded are scaled where they lie.

    In a layer whose q and k are normalised the weights cannot change a logit, so its gains are scaled.
    Layers without projections of their own (`inner_attention`) are looked up in the modules around them.
    Known are `qknorm.nn.Attention`, modules that hold a `qknorm.nn.QKNorm`,
    `torch.nn.MultiheadAttention`, and modules with a `head_dim`, linear layers `q_proj` and `k_proj`
    and no norm.

    The largest logit follows the factor exactly where logits are linear in q: without a soft-cap, and
    without a bias that is added to them. A maximum of 0 or less, or of a head without a query, is no
    reason to clip.

    Args:
        model: the module that the paths of `max_logit` belong to.
        max_logit: for each path of an attention module, the largest logit of each query head, `[Hq]`.
        tau: the limit, in the unit of a logit; 100 in the paper.
        projections: by path, what to scale in modules of other kinds.

    Returns:
        The factors tau / s `[Hq]`, fp64 on the CPU, of each layer in which one is below 1.

    Raises:
        ValueError: tau is not positive, a maximum is not finite, the projections of a layer are not
            known, or `FullyShardedDataParallel` has freed or flattened them. Nothing has changed then.
    """
    if not 0 < tau < float("inf"):
        raise ValueError(f"tau must be a positive number; got {tau:g}")
    plan: dict[str, tuple[Projections, Tensor]] = {}
    for path, tops in max_logit.items():
        worst = torch.tensor(list(tops), dtype=torch.float64, device="cpu")
        if bool((worst.isnan() | (worst == torch.inf)).any()):
            raise ValueError(
                f"the largest logit of {path} is not finite: nothing can be clipped any more"
            )
        factors = (tau / worst.clamp(min=tau)).to(torch.float64)
        if bool((factors < 1).any()):
            found = (projections or {}).get(path) or _find(model, path)
            plan[path] = found, _checked(path, found, factors)
    for parts, factors in plan.values():
        _scale(parts, factors)
    return {path: factors for path, (_, factors) in plan.items()}


def _checked(path: str, parts: Projections, factors: Tensor) -> Tensor:
    """Return the factors if all rows exist and fit them. Raises ValueError if not."""
    for rows in (*parts.q, *parts.k):
        size = rows.parameter.shape[:1]
        if rows.parameter.untyped_storage().size() == 0 or size < (
            rows.start + rows.heads * rows.width,
        ):
            raise ValueError(
                f"FullyShardedDataParallel has freed or flattened the projections of {path}: clip "
                "inside its context manager summon_full_params, or use fully_shard"
            )
        if len(factors) % rows.heads:
            raise ValueError(f"{path} has {len(factors)} maxima for a parameter of {rows.heads} heads")
    return factors


def _scale(parts: Projections, factors: Tensor) -> None:
    heads = {rows.heads for rows in (*parts.q, *parts.k)}
    is_shared = len(heads) > 1
    for rows in parts.q:
        _multiply(rows, factors if is_shared else factors.sqrt())
    if not is_shared:
        for rows in parts.k:
            _multiply(rows, factors.sqrt())


def _multiply(rows: HeadRows, factors: Tensor) -> None:
    """Multiply each head's rows by its factor; rows with the factor 1 keep their bits."""
    parameter = rows.parameter
    # The rounding of weights and of logits may not lift a maximum above tau again.
    shrunk = factors * (1 - max(torch.finfo(parameter.dtype).eps, 1e-6))
    each = torch.where(factors < 1, shrunk, factors).unflatten(0, (rows.heads, -1)).amin(1)
    whole = torch.ones(parameter.shape[0], dtype=torch.float64)
    whole[rows.start : rows.start + rows.heads * rows.width] = each.repeat_interleave(rows.width)
    factor: Tensor = whole.view(-1, *[1] * (parameter.dim() - 1)).to(parameter.device)
    if hasattr(parameter, "device_mesh"):
        from torch.distributed.tensor import Replicate, distribute_tensor  # slow to import

        mesh = parameter.device_mesh
        factor = distribute_tensor(factor, mesh, [Replicate()] * mesh.ndim, src_data_rank=None)
    # In fp64, so that one product is rounded once.
    if rows.offset:
        parameter.add_(((parameter.double() + rows.offset) * (factor - 1)).to(parameter.dtype))
    else:
        parameter.copy_((parameter.double() * factor).to(parameter.dtype))


def _find(model: nn.Module, path: str) -> Projections:
    """Return the projections of an attention module, or of the nearest module around it."""
    parts = path.split(".") if path else []
    for depth in range(len(parts), -1, -1):
        found = _projections(model.get_submodule(".".join(parts[:depth])))
        if found is not None:
            return found
    raise ValueError(
        f"the projections of {path or 'the model'} are not known: pass projections={{{path!r}: "
        "Projections(q=[HeadRows(...)], k=[HeadRows(...)])}"
    )


def _projections(module: nn.Module) -> Projections | None:
    """Return what a module projects q and k with, or the gains of its norms; None if that is not known.

    Raises ValueError if q and k are normalised and have no gain.
    """
    if isinstance(module, Attention):
        return _of_attention(module) if module.norm is None else _gains(module.norm)
    norms = [child for child in module.children() if isinstance(child, QKNorm)]
    if len(norms) == 1:
        return _gains(norms[0])
    if isinstance(module, nn.MultiheadAttention):
        return _of_multihead(module)
    q, k = getattr(module, "q_proj", None), getattr(module, "k_proj", None)
    width = getattr(module, "head_dim", None)
    has_norm = any("norm" in name.lower() for name, _ in module.named_children())
    if (
        not (isinstance(q, nn.Linear) and isinstance(k, nn.Linear) and isinstance(width, int))
        or has_norm
    ):
        return None
    return Projections(
        q=[HeadRows(p, len(p) // width, width) for p in q.parameters()],
        k=[HeadRows(p, len(p) // width, width) for p in k.parameters()],
    )


def _of_attention(module: Attention) -> Projections:
    c = module.config
    both = list(module.qkv.parameters())
    q = [HeadRows(p, c.num_heads, c.width) for p in both]
    k = [HeadRows(p, c.kv_heads, c.width, c.num_heads * c.width) for p in both]
    if module.sink_key is not None:
        k.append(HeadRows(module.sink_key, c.kv_heads, 1))
    return Projections(q, k)


def _gains(norm: QKNorm) -> Projections:
    rows = []
    for gain, heads in ((norm.q_gain, norm.heads["q"]), (norm.k_gain, norm.heads["k"])):
        if gain is None:
            raise ValueError("q and k are normalised and have no gain, so no logit can be scaled down")
        rows.append([HeadRows(gain, *_heads_of(gain, heads, norm.head_dim), offset=norm.dialect.offset)])
    return Projections(*rows)


def _heads_of(gain: Tensor, heads: int, width: int) -> tuple[int, int]:
    """Return how many heads a gain holds, and how many rows each has."""
    if gain.dim() == 2:
        return heads, 1
    return (1, width) if len(gain) == width else (heads, width)


def _of_multihead(module: nn.MultiheadAttention) -> Projections | None:
    if module.bias_k is not None:
        return None
    heads, width, C = module.num_heads, module.head_dim, module.embed_dim
    if module._qkv_same_embed_dim:
        q = [HeadRows(module.in_proj_weight, heads, width)]
        k = [HeadRows(module.in_proj_weight, heads, width, C)]
    else:
        q = [HeadRows(module.q_proj_weight, heads, width)]
        k = [HeadRows(module.k_proj_weight, heads, width)]
    if module.in_proj_bias is not None:
        q.append(HeadRows(module.in_proj_bias, heads, width))
        k.append(HeadRows(module.in_proj_bias, heads, width, C))
    return Projections(q, k)
