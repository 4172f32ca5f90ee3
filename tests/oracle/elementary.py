"""The exact fp32 fma and the elementary functions (contract section 3).

All functions take and return fp32 of any shape; NaN results are 0x7FFFFFFF.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from .formats import canonical, f32

F32 = NDArray[np.float32]

_LOG2E = f32(0x3FB8AA3B)
_SHIFT = np.float32(12582912)  # 1.5 * 2**23: adding it leaves an integer in the low bits
_LN2_HIGH = np.float32(0.693359375)
_LN2_LOW = f32(0x395E8083)  # 2.12194440e-4; ln 2 = _LN2_HIGH - _LN2_LOW
_EXP = [f32(b) for b in (0x3F000000, 0x3E2AAAAB, 0x3D2AAA40, 0x3C08883F, 0x3AB6CBA6, 0x3950DAE6)]
_TANH = [f32(b) for b in (0xBEAAAA9A, 0x3E0883B4, 0xBD5C2224, 0x3CA92B67, 0xBBBB55FB)]
_LOG = [f32(b) for b in (0x3F2AAAAA, 0x3ECCCD3E, 0x3E921C3D, 0x3E7182A1)]
_ONE = np.float32(1)
_TWO = np.float32(2)


@np.errstate(all="ignore")
def fma(a: ArrayLike, b: ArrayLike, c: ArrayLike) -> F32:
    """fp32 ``a*b + c`` rounded once, for every input: subnormals, infinities and NaNs included.

    The product is exact in fp64 (48 bits, exponents far inside its range). The fp64 sum is turned from nearest-even
    into round-to-odd with the exact error of the addition; as 53 >= 24 + 2, the last rounding to fp32 is then the only
    one that shows, also where fp32 keeps fewer than 24 bits.
    """
    product = np.asarray(a, np.float32).astype(np.float64) * np.asarray(b, np.float32).astype(np.float64)
    addend = np.asarray(c, np.float32).astype(np.float64)
    total = np.asarray(product + addend)
    back = total - product
    error = (product - (total - back)) + (addend - back)
    bits = total.view(np.int64)
    inexact = np.isfinite(total) & (error != 0) & (bits & 1 == 0)
    outward = (error > 0) == (total > 0)
    odd = np.where(inexact, bits + np.where(outward, 1, -1), bits)
    return canonical(odd.view(np.float64).astype(np.float32))


def poly(z: ArrayLike, *coefficients: np.float32) -> F32:
    """Horner's rule, one fma per step; the first coefficient is the constant term."""
    value = np.asarray(coefficients[-1], np.float32)
    for c in reversed(coefficients[:-1]):
        value = fma(value, z, c)
    return value


def _pow2(n: NDArray) -> F32:
    return np.ldexp(_ONE, n.astype(np.int32))


@np.errstate(all="ignore")
def exp(x: ArrayLike) -> F32:
    """exp with n = round(x / ln 2), a polynomial of degree 7 in the remainder, and two exact scalings."""
    x = np.asarray(x, np.float32)
    high, low = x > f32(0x42B17217), x < np.float32(-104)
    inside = np.where(high | low | np.isnan(x), np.float32(0), x)
    n = fma(inside, _LOG2E, _SHIFT) - _SHIFT
    r = fma(n, -_LN2_HIGH, inside)
    r = fma(n, _LN2_LOW, r)
    y = fma(poly(r, *_EXP), r * r, r) + _ONE
    n1 = np.floor(n / _TWO)
    y = (y * _pow2(n1)) * _pow2(n - n1)
    y = np.where(high, np.float32(np.inf), np.where(low, np.float32(0), y))
    return canonical(np.where(np.isnan(x), x, y))


@np.errstate(all="ignore")
def sigmoid(x: ArrayLike) -> F32:
    """1 / (1 + exp(-x))."""
    return canonical(_ONE / (_ONE + exp(-np.asarray(x, np.float32))))


@np.errstate(all="ignore")
def silu(x: ArrayLike) -> F32:
    """x / (1 + exp(-x)), one division."""
    x = np.asarray(x, np.float32)
    return canonical(x / (_ONE + exp(-x)))


@np.errstate(all="ignore")
def rsqrt(x: ArrayLike) -> F32:
    """1 / sqrt(x), both IEEE."""
    return canonical(_ONE / np.sqrt(np.asarray(x, np.float32)))


@np.errstate(all="ignore")
def tanh(x: ArrayLike) -> F32:
    """A polynomial below 0.625, the exponential form above it; the sign of x."""
    x = np.asarray(x, np.float32)
    a = np.abs(x)
    z = a * a
    small = fma(a * z, poly(z, *_TANH), a)
    large = _ONE - _TWO / (exp(_TWO * a) + _ONE)
    y = np.copysign(np.where(a < np.float32(0.625), small, large), x)
    return canonical(np.where(np.isnan(x), x, y))


@np.errstate(all="ignore")
def log(x: ArrayLike) -> F32:
    """Natural logarithm by x = m * 2**e and the series in s = (m - 1) / (m + 1)."""
    x = np.asarray(x, np.float32)
    ordinary = (x > 0) & np.isfinite(x)
    y = np.where(ordinary, x, _ONE)
    subnormal = y < f32(0x00800000)
    y = np.where(subnormal, y * np.float32(2**24), y)
    bits = y.view(np.uint32)
    k = (bits >> 23).astype(np.int32) - 127
    m = ((bits & np.uint32(0x7FFFFF)) | np.uint32(0x3F800000)).view(np.float32)
    upper = m >= f32(0x3FB504F3)
    m = np.where(upper, m * np.float32(0.5), m)
    e = (np.where(subnormal, -24, 0) + k + upper).astype(np.float32)
    s = (m - _ONE) / (m + _ONE)
    z = s * s
    w = fma(s * z, poly(z, *_LOG), _TWO * s)
    result = fma(e, _LN2_HIGH, fma(e, -_LN2_LOW, w))
    result = np.where(x == 0, np.float32(-np.inf), np.where(x == np.float32(np.inf), x, result))
    return canonical(np.where((x < 0) | np.isnan(x), np.float32(np.nan), result))
