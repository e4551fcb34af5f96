"""What the Triton kernels share: products that half precision does not spoil.

q, k and v come in half precision and are exact as they are. Samples and landmarks are
float32, and stand in an exponent: rounded to 8 or 11 bits, inputs ten times as large
would give other weights. So they are the sum of two rounded numbers, with a product each.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def in_two(x, dtype: tl.constexpr):
    """float32 as a rounded number and the rest, in `dtype`; all of it is in the first if wide."""
    high = x.to(dtype)
    return high, (x - high.to(tl.float32)).to(dtype)


@triton.jit
def product(x, high, low, PRECISION: tl.constexpr):
    """x [M,K] times a matrix [K,L] in two parts -> float32."""
    if x.dtype == tl.float32:
        return tl.dot(x, high, input_precision=PRECISION)
    return tl.dot(x, low, acc=tl.dot(x, high))


@triton.jit
def product_of_parts(high, low, x, PRECISION: tl.constexpr):
    """A matrix [M,K] in two parts times x [K,L] -> float32."""
    if x.dtype == tl.float32:
        return tl.dot(high, x, input_precision=PRECISION)
    return tl.dot(low, x, acc=tl.dot(high, x))


@triton.jit
def gradient_product(grad, x, TWICE: tl.constexpr, PRECISION: tl.constexpr):
    """grad [M,K] float32 times x [K,L] -> float32.

    Gradients may be beyond the range of float16, whose rows are therefore scaled to 1.
    TWICE: the gradient in two parts, where a second product will take most of it away.
    """
    if x.dtype == tl.float32:
        return tl.dot(grad, x, input_precision=PRECISION)
    if x.dtype == tl.float16:
        size = tl.max(tl.abs(grad), 1)
        size = tl.where(size > 0, size, 1.0)[:, None]
        grad = grad / size
    high, low = in_two(grad, x.dtype)
    out = tl.dot(high, x)
    if TWICE:
        out = tl.dot(low, x, acc=out)
    if x.dtype == tl.float16:
        out = out * size
    return out
