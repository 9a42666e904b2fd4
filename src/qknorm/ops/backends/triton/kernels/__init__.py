"""Triton kernels. This legend holds for all of them.

Sizes: B batch, T tokens (Tq, Tk), H heads (Hq, Hk, G = Hq / Hk), D head width, V value width, R rotary
width; M rows and N keys of a tile.

Pointers: `x` points to a tensor with any strides, which are `x_sb`, `x_sh` and `x_st` for batch, head
and token (the last axis has stride 1). `x_ptr` points to a contiguous tensor.

Logits inside the kernels are in units of log2, with c = |scale| * log2(e), so that exp becomes exp2.
Offsets within a tile are int32. The offsets of batch entries, heads and tiles are int64.
"""
