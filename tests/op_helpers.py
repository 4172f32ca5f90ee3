"""Shared by the op tests: random bits, comparison bit for bit."""

from __future__ import annotations

import ml_dtypes
import numpy as np

BF16 = ml_dtypes.bfloat16

# Halfway cases, ends of ranges, subnormals, infinities and NaNs with payloads, as fp32 bits.
_SPECIALS = """
    0 1 2 7FFFFF 800000 800001 3F800000 3F808000 3F818000 42B17217 42B17218 42CFFFFF 42D00000 42D00001 3F200000 3F1FFFFF
    3FB504F3 3FB504F2 7F7FFFFF 7F7F8000 7F7F7FFF 7F800000 7F800001 7FC00000 7FFFFFFF 3E800000 3F400000 3FA00000 40200000
    43E00000
"""
SPECIALS = np.array([int(bits, 16) for bits in _SPECIALS.split()], np.uint32)


def random_floats(seed: int, n: int) -> np.ndarray:
    """fp32 numbers: half of them any bits, half of ordinary size, and the specials of both signs."""
    rng = np.random.default_rng(seed)
    wild = rng.integers(0, 2**32, n // 2, dtype=np.uint32)
    tame = (rng.normal(size=n - n // 2) * 10.0 ** rng.uniform(-6, 2, n - n // 2)).astype(np.float32)
    bits = np.concatenate([wild, tame.view(np.uint32)])
    bits[: len(SPECIALS)] = SPECIALS
    bits[len(SPECIALS) : 2 * len(SPECIALS)] = SPECIALS | np.uint32(0x80000000)
    return bits.view(np.float32)


def normal(rng: np.random.Generator, *shape: int, scale: float = 1.0) -> np.ndarray:
    """Normally distributed bf16."""
    return (rng.normal(size=shape) * scale).astype(BF16)


def wild(rng: np.random.Generator, *shape: int) -> np.ndarray:
    """bf16 of ordinary size with a few elements of arbitrary bits: subnormals, huge numbers, infinities, NaNs."""
    x = normal(rng, *shape)
    bits = rng.integers(0, 2**16, shape, dtype=np.uint16).view(BF16)
    return np.where(rng.random(shape) < 0.002, bits, x)


def same(actual: object, expected: object) -> None:
    """Both arrays have the same dtype, shape and bytes."""
    a, b = np.asarray(actual), np.asarray(expected)
    assert a.dtype == b.dtype, (a.dtype, b.dtype)
    assert a.shape == b.shape, (a.shape, b.shape)
    unsigned = {1: np.uint8, 2: np.uint16, 4: np.uint32}[a.dtype.itemsize]
    a, b = np.ascontiguousarray(a).view(unsigned), np.ascontiguousarray(b).view(unsigned)
    wrong = np.argwhere(a != b)
    assert not len(wrong), f"{len(wrong)} of {a.size} differ, first at {wrong[0]}: {a[a != b][0]:#x}, {b[a != b][0]:#x}"
