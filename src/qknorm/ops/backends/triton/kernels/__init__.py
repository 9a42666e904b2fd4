"""Triton kernels. One legend for all of them.

Shapes: B batch, T tokens (Tq, Tk), H heads (Hq, Hk, G = Hq / Hk), D head width, V value width,
R rotary width; M rows and N keys of a tile. Pointers carry the name of the tensor, `_s` its strides
(b, h, t; the last axis has stride 1), `_ptr` a tensor that is contiguous.

Logits inside are in units of log2: c = |scale| * log2(e), so that exp is exp2. Offsets within a tile
are int32; what is added per batch row, head and tile is int64.
"""
