"""Segments, lanes and the sums of squares (contract section 2)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from .elementary import fma
from .formats import canonical


def segments(x: NDArray) -> NDArray:
    """[..., n, K] -> [8, ..., n, K/8]: eight equal contiguous segments of the last axis, moved to the front."""
    length = x.shape[-1]
    if length % 128:
        raise ValueError(f"a reduced dimension is a multiple of 128, not {length}")
    return np.moveaxis(x.reshape(*x.shape[:-1], 8, length // 8), -2, 0)


@np.errstate(all="ignore")
def tree8(s: NDArray) -> NDArray[np.float32]:
    """fp32 [8, ...] -> [...]: ((s0+s1)+(s2+s3)) + ((s4+s5)+(s6+s7))."""
    return canonical(((s[0] + s[1]) + (s[2] + s[3])) + ((s[4] + s[5]) + (s[6] + s[7])))


@np.errstate(all="ignore")
def fold16(lane: NDArray) -> NDArray[np.float32]:
    """fp32 [..., 16] -> [...]: neighbours added pairwise, four times."""
    for _ in range(4):
        lane = lane[..., 0::2] + lane[..., 1::2]
    return canonical(lane[..., 0])


def lanes(x: NDArray, y: NDArray) -> NDArray[np.float32]:
    """Sum of products over the last axis, of any length: 16 fma accumulators by ``i mod 16``, then ``fold16``.

    Leading dims broadcast; bf16 arguments are widened exactly.
    """
    x, y = np.asarray(x).astype(np.float32), np.asarray(y).astype(np.float32)
    acc = np.zeros((*np.broadcast_shapes(x.shape[:-1], y.shape[:-1]), 16), np.float32)
    for i in range(0, x.shape[-1], 16):
        count = min(16, x.shape[-1] - i)
        acc[..., :count] = fma(x[..., i : i + count], y[..., i : i + count], acc[..., :count])
    return fold16(acc)


def sumsq(x: NDArray) -> NDArray[np.float32]:
    """Sum of squares over a model dimension, [..., n] -> [...]: tree8 of the segments' lanes."""
    parts = segments(np.asarray(x).astype(np.float32))
    return tree8(lanes(parts, parts))


def sumsq64(x: NDArray) -> NDArray[np.float32]:
    """Sum of squares over one head, [..., 64] -> [...]: no segments."""
    if x.shape[-1] != 64:
        raise ValueError("a head has 64 elements")
    return lanes(x, x)
