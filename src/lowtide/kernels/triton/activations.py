# pyright: basic, reportArgumentType=false
"""The activations inside of kernels: φ, φ' and φ⁻¹ of float32 values, chosen at compile time by a number.

Only functions that Triton's interpreter knows are used, so that every kernel can be tested on a CPU.
"""

from __future__ import annotations

import triton
import triton.language as tl

from lowtide.kernels.activations import FUSED

CODES = {**FUSED, "prelu": 12}
GELU_TANH = 7
GELU_CUDA13 = 13


@triton.jit
def expm1(x):
    """exp(x) - 1 without cancellation (Kahan): the error of exp is undone by the logarithm of its own result."""
    u = tl.exp(x)
    near = (u - 1.0) * x / tl.log(tl.where(u == 1.0, 2.0, u))
    return tl.where(u == 1.0, x, tl.where((u < 1e-6) | (x > 40.0), u - 1.0, near))


@triton.jit
def log1p(x):
    u = 1.0 + x
    return tl.where(u == 1.0, x, tl.log(u) * x / tl.where(u == 1.0, 1.0, u - 1.0))


@triton.jit
def tanh(x):
    t = expm1(-2.0 * tl.abs(x))
    size = -t / (t + 2.0)
    return tl.where(x < 0.0, -size, size)


@triton.jit
def erf_cuda13(x):
    """The error function as CUDA 13 rounds it, and so torch's GELU where it was built with that.

    ``tl.erf`` is an older release's, whose last bits differ beyond 1.003; GELU shows them where 1 + erf is small. The
    bits fix the coefficients: x + x·p(x²) inside, ±(1 - 2^(-|x| - |x|·q(|x|))) outside.
    """
    size = tl.abs(x)
    far = size >= 1.00296
    t = tl.where(far, size, x * x)
    p = tl.where(far, 0.000112198715, 8.4834945e-05)
    p = tl.fma(p, t, tl.where(far, -0.0013275252, -0.00082130916))
    p = tl.fma(p, t, tl.where(far, 0.008396535, 0.005213489))
    p = tl.fma(p, t, tl.where(far, -0.040246584, -0.026868774))
    p = tl.fma(p, t, tl.where(far, 0.15950431, 0.11284005))
    p = tl.fma(p, t, tl.where(far, 0.9129177, -0.37612665))
    p = tl.fma(p, t, tl.where(far, 0.62906003, 0.12837915))
    base = tl.where(far, -size, x)
    p = tl.fma(p, base, base)
    outside = 1.0 - tl.exp2(p)
    return tl.where(far, tl.where(x < 0.0, -outside, outside), p)


@triton.jit
def phi(y, a, b, ACT: tl.constexpr):
    """Z = φ(y); ``a`` and ``b`` are the activation's numbers, ``a`` the slope of a PReLU."""
    if ACT == 1:
        # NaN stays NaN, as in torch.
        return tl.where(y > 0.0, y, tl.where(y != y, y, 0.0))
    elif ACT == 2 or ACT == 12:
        return tl.where(y > 0.0, y, a * y)
    elif ACT == 3:
        return tl.where(y > 0.0, y, a * expm1(tl.minimum(y, 0.0)))
    elif ACT == 4:
        return tl.where(y > 0.0, y, a * expm1(tl.minimum(y, 0.0) / a))
    elif ACT == 5:
        return y / (1.0 + tl.exp(-y))
    elif ACT == 6:
        return 0.5 * y * (1.0 + tl.erf(y * 0.7071067811865476))
    elif ACT == 7:
        return 0.5 * y * (1.0 + tanh(0.7978845608028654 * (y + 0.044715 * y * y * y)))
    elif ACT == 13:
        return 0.5 * y * (1.0 + erf_cuda13(y * 0.7071067811865476))
    elif ACT == 8:
        return y * tl.minimum(tl.maximum(y + 3.0, 0.0), 6.0) / 6.0
    elif ACT == 9:
        return tanh(y)
    elif ACT == 10:
        return 1.0 / (1.0 + tl.exp(-y))
    elif ACT == 11:
        t = y * a
        small = tl.maximum(t, 0.0) + log1p(tl.exp(-tl.abs(t)))
        return tl.where(t > b, y, small / a)
    else:
        return y


@triton.jit
def slope(y, a, b, ACT: tl.constexpr):
    """φ'(y)."""
    if ACT == 1:
        return tl.where(y > 0.0, 1.0, 0.0)
    elif ACT == 2 or ACT == 12:
        return tl.where(y > 0.0, 1.0, a)
    elif ACT == 3:
        return tl.where(y > 0.0, 1.0, a * tl.exp(tl.minimum(y, 0.0)))
    elif ACT == 4:
        return tl.where(y > 0.0, 1.0, tl.exp(tl.minimum(y, 0.0) / a))
    elif ACT == 5:
        s = 1.0 / (1.0 + tl.exp(-y))
        return s * (1.0 + y * (1.0 - s))
    elif ACT == 6:
        return 0.5 * (1.0 + tl.erf(y * 0.7071067811865476)) + y * 0.3989422804014327 * tl.exp(-0.5 * y * y)
    elif ACT == 7:
        inner = 0.7978845608028654 * (y + 0.044715 * y * y * y)
        t = tanh(inner)
        return 0.5 * (1.0 + t) + 0.5 * y * (1.0 - t * t) * 0.7978845608028654 * (1.0 + 0.134145 * y * y)
    elif ACT == 8:
        return tl.where(y < -3.0, 0.0, tl.where(y <= 3.0, y / 3.0 + 0.5, 1.0))
    elif ACT == 9:
        t = tanh(y)
        return 1.0 - t * t
    elif ACT == 10:
        s = 1.0 / (1.0 + tl.exp(-y))
        return s * (1.0 - s)
    elif ACT == 11:
        t = y * a
        return tl.where(t > b, 1.0, 1.0 / (1.0 + tl.exp(-t)))
    else:
        return tl.full(y.shape, 1.0, y.dtype)


@triton.jit
def inverse(z, a, b, unit, ACT: tl.constexpr):
    """φ⁻¹(z); a saturated z gives the last y that can be told from the end. ``unit`` is the roundoff of z.

    The side of a leaky ReLU is that of the sign bit, since tiny negatives round to -0.
    """
    if ACT == 2 or ACT == 3 or ACT == 4:
        negative = z.to(tl.int32, bitcast=True) < 0
        if ACT == 2:
            return tl.where(negative, z * (1.0 / a), z)
        elif ACT == 3:
            return tl.where(negative, log1p(tl.maximum(z / a, unit - 1.0)), z)
        else:
            return tl.where(negative, a * log1p(tl.maximum(z / a, unit - 1.0)), z)
    elif ACT == 9:
        c = tl.minimum(tl.maximum(z, unit - 1.0), 1.0 - unit)
        return 0.5 * (log1p(c) - log1p(-c))
    elif ACT == 10:
        c = tl.minimum(tl.maximum(z, 1.2e-38), 1.0 - unit)
        return tl.log(c) - log1p(-c)
    elif ACT == 11:
        t = z * a
        c = tl.maximum(t, 1.2e-38)
        return tl.where(t > b, z, (c + tl.log(-expm1(-c))) / a)
    else:
        return z
