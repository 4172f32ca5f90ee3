"""NVFP4: the two quantisers (contract section 8) and the two quantised GEMMs (section 5)."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from .formats import (
    E4M3_NAN,
    R,
    canonical,
    e2m1_decode,
    e2m1_rn_sat,
    e4m3_decode,
    e4m3_sat,
    pack_nibbles,
    unpack_nibbles,
)
from .fsum16 import gemm
from .reduce import tree8

U8 = NDArray[np.uint8]
_SIX = np.float32(6)


def _split16(x: NDArray) -> NDArray[np.float32]:
    if x.shape[-1] % 16:
        raise ValueError("a quantised row is a multiple of 16 long")
    return x.astype(np.float32).reshape(*x.shape[:-1], x.shape[-1] // 16, 16)


@np.errstate(all="ignore")
def quantise_activations(x: NDArray, input_scale: ArrayLike) -> tuple[U8, U8]:
    """bf16 ``x`` [..., K] and one fp32 scale -> packed codes [..., K/2] and e4m3 scales [..., K/16].

    A block with a NaN or an infinity gets the scale 0x7F and codes 0.
    """
    scale = np.float32(input_scale)
    blocks = _split16(x)
    bad = ~np.isfinite(blocks).all(axis=-1)
    amax = np.where(bad, np.float32(0), np.abs(blocks).max(axis=-1))
    sf = np.where(bad, E4M3_NAN, e4m3_sat((amax / _SIX) / scale)).astype(np.uint8)
    d = e4m3_decode(sf) * scale
    code = e2m1_rn_sat(blocks / d[..., None])
    code = np.where((bad | (sf == 0))[..., None], 0, code)
    return pack_nibbles(code.reshape(x.shape)), sf


@np.errstate(all="ignore")
def quantise_weights(w: NDArray) -> tuple[U8, U8, np.float32]:
    """One tensor ``w`` [..., K] -> packed codes [..., K/2], e4m3 scales [..., K/16] and the tensor's weight_scale_2."""
    blocks = _split16(w)
    if not np.isfinite(blocks).all():
        raise ValueError("a weight is not finite")
    amax = np.abs(blocks).max(axis=-1)
    ws2 = np.float32(amax.max()) / np.float32(2688) if amax.any() else np.float32(1)
    t = amax / (_SIX * ws2)
    t = np.where(t == 0, np.float32(1), t)
    sf = e4m3_sat(np.clip(t, np.float32(2.0**-9), np.float32(448)))
    code = e2m1_rn_sat(blocks / (e4m3_decode(sf) * ws2)[..., None])
    return pack_nibbles(code.reshape(w.shape)), sf, np.float32(ws2)


def dequantise(packed: NDArray, sf: NDArray) -> NDArray:
    """The exact bf16 operand e2m1(code) * e4m3(scale), without weight_scale_2: [..., K/2], [..., K/16] -> [..., K]."""
    code = unpack_nibbles(packed)
    scale = np.repeat(e4m3_decode(sf), 16, axis=-1)
    value = e2m1_decode(code) * scale
    operand = R(value)
    assert np.array_equal(operand.astype(np.float32), value, equal_nan=True)
    return operand


@np.errstate(all="ignore")
def gemm_w4a16(x: NDArray, w_packed: NDArray, w_sf: NDArray, ws2: ArrayLike) -> NDArray[np.float32]:
    """bf16 ``x`` [T, K], NVFP4 weights [N, K/2] and [N, K/16] -> fp32 [T, N], times ``weight_scale_2``."""
    return canonical(gemm(x, dequantise(w_packed, w_sf)) * np.float32(ws2))


@np.errstate(all="ignore")
def gemm_w4a4(
    x_packed: NDArray, x_sf: NDArray, input_scale: ArrayLike, w_packed: NDArray, w_sf: NDArray, ws2: ArrayLike
) -> NDArray[np.float32]:
    """NVFP4 activations [T, K/2], [T, K/16] and weights [N, K/2], [N, K/16] -> fp32 [T, N].

    The e2m1 sums are multiples of 1/4 below 2**10 and a product of two scales has 8 bits, so a block's term is exact.
    """
    x, w = e2m1_decode(unpack_nibbles(x_packed)), e2m1_decode(unpack_nibbles(w_packed))
    sx, sw = e4m3_decode(x_sf), e4m3_decode(w_sf)
    if x.shape[-1] % 128:
        raise ValueError("a reduced dimension is a multiple of 128")
    per_segment = x.shape[-1] // 128
    parts = np.zeros((8, x.shape[0], w.shape[0]), np.float32)
    for segment in range(8):
        for block in range(segment * per_segment, (segment + 1) * per_segment):
            k = slice(16 * block, 16 * block + 16)
            inner = x[:, k] @ w[:, k].T
            term = inner * (sw[None, :, block] * sx[:, None, block])
            parts[segment] = parts[segment] + term
    return canonical(tree8(parts) * (np.float32(ws2) * np.float32(input_scale)))
