"""Number formats: bf16, canonical NaNs, e4m3, e2m1 and packed nibbles (contract section 1)."""

from __future__ import annotations

import ml_dtypes
import numpy as np
from numpy.typing import ArrayLike, NDArray

bfloat16 = ml_dtypes.bfloat16

NAN32 = np.uint32(0x7FFFFFFF)
NAN16 = np.uint16(0x7FFF)
E4M3_NAN = 0x7F
E2M1_MAGNITUDES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)


def f32(bits: int) -> np.float32:
    """The fp32 number with the bit pattern ``bits``."""
    return np.uint32(bits).view(np.float32)


def canonical(x: ArrayLike) -> NDArray[np.float32]:
    """fp32 ``x`` as an op stores it: every NaN becomes 0x7FFFFFFF."""
    bits = np.array(x, np.float32, ndmin=1)
    view = bits.view(np.uint32)
    view[np.isnan(bits)] = NAN32
    return bits.reshape(np.shape(x))


def R(x: ArrayLike) -> NDArray:
    """fp32 -> bf16: nearest even, overflow to infinity, subnormals kept, any NaN becomes 0x7FFF."""
    x = np.asarray(x, np.float32)
    bits = np.ascontiguousarray(x).view(np.uint32).astype(np.uint64)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(x), NAN16, rounded.reshape(x.shape)).astype(np.uint16).view(bfloat16)


def widen(x: NDArray) -> NDArray[np.float32]:
    """bf16 (or fp16, or fp32) -> fp32, exact."""
    return np.asarray(x).astype(np.float32)


def _e4m3_table() -> NDArray[np.float32]:
    code = np.arange(256)
    exponent, fraction = (code >> 3) & 15, code & 7
    significand = np.where(exponent == 0, fraction, fraction + 8)
    value = np.ldexp(significand.astype(np.float64), np.maximum(exponent, 1) - 7 - 3)
    value = np.where(code & 0x80, -value, value)
    return canonical(np.where((code & 0x7F) == E4M3_NAN, np.nan, value))


_E4M3 = _e4m3_table()


def e4m3_decode(code: NDArray) -> NDArray[np.float32]:
    """e4m3 codes (uint8, or float8_e4m3fn taken as its bits) -> exact fp32; 0x7F and 0xFF are NaN."""
    return _E4M3[_as_bytes(code)]


@np.errstate(all="ignore")
def e4m3_sat(x: ArrayLike) -> NDArray[np.uint8]:
    """fp32 ``x >= 0`` -> e4m3 code: nearest even, above 448 (infinity too) -> 448, NaN -> 0x7F."""
    x = np.asarray(x, np.float32)
    if np.any(x < 0):
        raise ValueError("e4m3_sat is defined for x >= 0")
    y = np.where(np.isnan(x), 0, np.minimum(x, np.float32(448))).astype(np.float64)
    exponent = np.where(y < 2.0**-6, -6, np.frexp(y)[1] - 1)  # 2**exponent <= y, or zero's and the subnormals' exponent
    steps = np.rint(np.ldexp(y, 3 - exponent)).astype(np.int64)  # 8..16, or 0..8 when subnormal; ties to even
    return np.where(np.isnan(x), E4M3_NAN, (exponent + 6) * 8 + steps).astype(np.uint8)


def e2m1_rn_sat(y: ArrayLike) -> NDArray[np.uint8]:
    """fp32 -> e2m1 code 0..15 by the thresholds of section 1; the sign bit is set when ``y < 0``."""
    y = np.asarray(y, np.float32)
    a = np.abs(y)
    conditions = [a > 5, a >= 3.5, a > 2.5, a >= 1.75, a > 1.25, a >= 0.75, a > 0.25]
    magnitude = np.select(conditions, [7, 6, 5, 4, 3, 2, 1], 0)
    return (magnitude + 8 * (y < 0)).astype(np.uint8)


def e2m1_decode(code: NDArray) -> NDArray[np.float32]:
    """e2m1 codes 0..15 -> exact fp32 (code 8 is -0.0)."""
    code = np.asarray(code, np.uint8)
    magnitude = E2M1_MAGNITUDES[code & 7]
    return np.where(code & 8, -magnitude, magnitude)


def pack_nibbles(code: NDArray) -> NDArray[np.uint8]:
    """Codes uint8 [..., K] -> bytes [..., K/2], element 2j in the low nibble."""
    code = np.asarray(code, np.uint8)
    return code[..., 0::2] | (code[..., 1::2] << 4)


def unpack_nibbles(packed: NDArray) -> NDArray[np.uint8]:
    """Bytes uint8 [..., K/2] -> codes [..., K]."""
    packed = np.asarray(packed, np.uint8)
    return np.stack([packed & 15, packed >> 4], axis=-1).reshape(*packed.shape[:-1], -1)


def _as_bytes(code: NDArray) -> NDArray[np.uint8]:
    code = np.asarray(code)
    return code if code.dtype == np.uint8 else code.view(np.uint8)
