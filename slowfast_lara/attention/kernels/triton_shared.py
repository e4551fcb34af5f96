"""Notation of the Triton kernels, and matmuls of a float32 operand with a half-precision operand.

Names are those of the equations in importance_sampling.py and samples.py:

    w_c             samples             q~_c   landmarks
    L_cf, M_cf      key statistics: log-sum and mean value of sample c over frame f
                    (in `combine`, L_cf includes the log-weight of sample c)
    r_nc            alignment scores, rbar_n their weighted sum, log Z_c their log-normaliser
    s_nc            q_n.w_c + log alpha_nc
    p_ncf           softmax_c(s_nc + L_cf)
    dx              gradient of x

    x_ptr           pointer argument to a whole tensor, x_stride_n a stride of it
    p_x, b_x        pointers to, and values of, a block of x
    n, c, d, f, p   index vectors of queries, samples, head components, frames and keys
    mask_n, mask_nd masks of the indices that are in range
    B, H, N, F, P, C, D, BLOCK_N   sizes and block sizes

bh is the flat index of clip b and head h. Offsets that may exceed 2**31 are int64. `scale` is
d**-0.5 in the kernels of `merged` and `temporal`, and d**-0.25 in all others. In memory, q and k
are not scaled; samples and landmarks are in the scaled space, except the landmarks that `landmarks`
writes and `proposals` reads.

q, k and v may be half precision and enter matmuls as they are. Samples and landmarks are float32.
Their dot products are logits, in which rounding of large samples or landmarks to the 8 or 11
significant bits of bfloat16 or float16 would change the softmax weights. They are split into a
rounded part `hi` and a remainder `lo`, with one matmul for each part.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def own_block(N, F, H, BLOCK: tl.constexpr):
    """Indices bh, b, h and f of a program, and its block of indices along the axis of length N."""
    blocks = tl.cdiv(N, BLOCK)
    pid = tl.program_id(0)
    bh = (pid // (blocks * F)).to(tl.int64)
    n = pid % blocks * BLOCK + tl.arange(0, BLOCK)
    return bh, bh // H, bh % H, pid // blocks % F, n


@triton.jit
def split_float32(x, dtype: tl.constexpr):
    """x as hi + lo in `dtype`; lo is zero if dtype is float32."""
    hi = x.to(dtype)
    return hi, (x - hi.to(tl.float32)).to(dtype)


@triton.jit
def dot_split_right(x, hi, lo, PRECISION: tl.constexpr):
    """x [M,K] @ (hi + lo) [K,L] -> float32."""
    if x.dtype == tl.float32:
        return tl.dot(x, hi, input_precision=PRECISION)
    return tl.dot(x, lo, acc=tl.dot(x, hi))


@triton.jit
def dot_split_left(hi, lo, x, PRECISION: tl.constexpr):
    """(hi + lo) [M,K] @ x [K,L] -> float32."""
    if x.dtype == tl.float32:
        return tl.dot(hi, x, input_precision=PRECISION)
    return tl.dot(lo, x, acc=tl.dot(hi, x))


@triton.jit
def dot_gradient(grad, x, SPLIT: tl.constexpr, PRECISION: tl.constexpr):
    """grad [M,K] float32 @ x [K,L] -> float32.

    For float16, each row of the gradient is scaled to a largest magnitude of 1 before the matmul,
    to stay in range, and the result is scaled back. With SPLIT, the rounding error `lo` of the
    gradient is multiplied too, which matters if a later subtraction cancels most of the result.
    """
    if x.dtype == tl.float32:
        return tl.dot(grad, x, input_precision=PRECISION)
    if x.dtype == tl.float16:
        size = tl.max(tl.abs(grad), 1)
        size = tl.where(size > 0, size, 1.0)[:, None]
        grad = grad / size
    hi, lo = split_float32(grad, x.dtype)
    out = tl.dot(hi, x)
    if SPLIT:
        out = tl.dot(lo, x, acc=out)
    if x.dtype == tl.float16:
        out = out * size
    return out
