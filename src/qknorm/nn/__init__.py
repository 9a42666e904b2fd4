"""Modules: attention layers with QK-norm, rotary embeddings, a KV cache, and parameter groups."""

from qknorm.nn.attention import Attention
from qknorm.nn.attention_config import AttentionConfig
from qknorm.nn.kv_cache import KVCache
from qknorm.nn.marks import mark, marked_parameters
from qknorm.nn.param_groups import param_groups
from qknorm.nn.qk_clip import HeadRows, Projections, qk_clip_
from qknorm.nn.qk_norm import QKNorm
from qknorm.nn.rotary import RopeScaling, RotaryEmbedding
from qknorm.nn.row_blocks import row_blocks

__all__ = [
    "Attention",
    "AttentionConfig",
    "HeadRows",
    "KVCache",
    "Projections",
    "QKNorm",
    "RopeScaling",
    "RotaryEmbedding",
    "mark",
    "marked_parameters",
    "param_groups",
    "qk_clip_",
    "row_blocks",
]
