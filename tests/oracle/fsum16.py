"""The 16-wide fused sum, its chains, and the GEMM built on them (contract sections 4 and 5).

Operands are decoded once into integer fields. A significand counts units of ``2**(exponent - m)``, ``m`` being the
format's fraction bits, so a product counts units of ``2**(exp_a + exp_b - 2m)`` and, shifted left by ``25 - 2m``, units
of ``2**(exp_a + exp_b - 25)``. Truncating a term to the grid ``2**(e - 25)`` is then one right shift of its magnitude
by ``e - exponent``. Magnitudes are below 2**27 (int32); the sums of 17 of them are int64. Nothing here rounds.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from .formats import bfloat16, canonical
from .reduce import segments, tree8

_FRACTION = {"bf16": 7, "fp16": 10}
_EXPONENT_MASK = {"bf16": 0xFF, "fp16": 0x1F}
_DTYPE = {"bf16": bfloat16, "fp16": np.float16}
_NONE = -2000  # the exponent of a zero: below every real one, sums of two included
_TILE = 1 << 17  # products held at once by `chains`


class Operand(NamedTuple):
    """Decoded bf16 or fp16 numbers; all fields have one shape."""

    significand: NDArray[np.int32]
    exponent: NDArray[np.int32]  # of the leading bit of a normal number; the format's minimum if subnormal
    sign: NDArray[np.int32]  # 0, or -1 when negative
    kind_of: NDArray[np.float32]  # signed 0, +-1 for any finite non-zero number, or the infinity or NaN itself

    def take(self, index: object) -> Operand:
        return Operand(*(field[index] for field in self))


def decode(x: NDArray, kind: str = "bf16") -> Operand:
    """Raw uint16 bits, or an array of the format's dtype -> fields of the same shape."""
    x = np.asarray(x)
    if x.dtype != np.uint16:
        if x.dtype != _DTYPE[kind]:
            raise TypeError(f"expected uint16 bits or {_DTYPE[kind]}, got {x.dtype}")
        x = x.view(np.uint16)
    bits, fraction, mask = x.astype(np.int32), _FRACTION[kind], _EXPONENT_MASK[kind]
    field = (bits >> fraction) & mask
    low = bits & ((1 << fraction) - 1)
    significand = low + ((field > 0).astype(np.int32) << fraction)
    exponent = np.where(significand == 0, _NONE, np.maximum(field, 1) - (mask >> 1)).astype(np.int32)
    sign = -(bits >> 15)
    kind_of = np.where(field == mask, np.where(low == 0, np.inf, np.nan), significand != 0)
    return Operand(significand, exponent, sign, np.copysign(kind_of, sign + 0.5).astype(np.float32))


@np.errstate(all="ignore")
def _step(acc: NDArray[np.float32], a: Operand, b: Operand, kind: str) -> NDArray[np.float32]:
    """One fused sum; ``acc`` [...], ``a`` and ``b`` [16, ...] (they broadcast against each other)."""
    acc_bits = acc.view(np.uint32).astype(np.int64)
    acc_field = (acc_bits >> 23) & 0xFF
    acc_significand = (acc_bits & 0x7FFFFF) + ((acc_field > 0).astype(np.int64) << 23)
    acc_exponent = np.where(acc_significand == 0, _NONE, np.maximum(acc_field, 1) - 127)

    # Rule 1: exponents of the operands, not renormalised. Rule 2: the largest one sets the grid.
    exponent = a.exponent + b.exponent
    e = np.maximum(exponent.max(axis=0), acc_exponent)
    term = a.significand * (b.significand << (25 - 2 * _FRACTION[kind]))
    np.subtract(e.astype(np.int32), exponent, out=exponent)
    np.minimum(exponent, 31, out=exponent)
    np.right_shift(term, exponent, out=term)
    sign = a.sign ^ b.sign
    np.bitwise_xor(term, sign, out=term)
    np.subtract(term, sign, out=term)
    acc_term = (acc_significand << 2) >> np.minimum(e - acc_exponent, 62)
    total = term.sum(axis=0, dtype=np.int64) + np.where(acc_bits >> 31, -acc_term, acc_term)

    # Rule 3: truncate to 24 bits, or to 2**-149. The cast makes 2**128 and above infinite and is exact otherwise.
    # A zero is +0, whatever the signs of the terms.
    magnitude, unit = np.abs(total), e - 25
    length = np.frexp(magnitude.astype(np.float64))[1]
    drop = np.maximum(np.maximum(length - 24, -149 - unit), 0)
    kept = magnitude >> np.minimum(drop, 62)
    value = np.ldexp(kept.astype(np.float64), (unit + drop).astype(np.int32))
    result = np.where((total < 0) & (kept != 0), -value, value).astype(np.float32)

    # Rule 4: infinities and NaNs by IEEE arithmetic on 0, +-1, inf, NaN (finite sums stay small).
    acc_special = acc_field == 255
    if acc_special.any() or not (np.isfinite(a.kind_of).all() and np.isfinite(b.kind_of).all()):
        special = (a.kind_of * b.kind_of).sum(axis=0) + np.where(acc_special, acc, np.float32(0))
        result = np.where(np.isfinite(special), result, special)
    return canonical(result)


def fsum16(acc: NDArray, a: NDArray, b: NDArray, kind: str = "bf16") -> NDArray:
    """``acc`` [...] + sum of ``a`` [..., 16] * ``b`` [..., 16], as one Hopper mma computes it; leading dims broadcast.

    ``a`` and ``b`` are uint16 bits or the format's dtype. ``acc`` is fp32, or uint32 bits and then so is the result.
    """
    acc = np.asarray(acc)
    if acc.dtype not in (np.uint32, np.float32):
        raise TypeError(f"the accumulator is fp32 or uint32 bits, not {acc.dtype}")
    if np.shape(a)[-1] != 16 or np.shape(b)[-1] != 16:
        raise ValueError("fsum16 takes 16 products")
    lead = np.broadcast_shapes(acc.shape, np.shape(a)[:-1], np.shape(b)[:-1])
    fields = [decode(np.moveaxis(np.broadcast_to(x, (*lead, 16)), -1, 0).reshape(16, -1), kind) for x in (a, b)]
    flat = np.ascontiguousarray(np.broadcast_to(acc, lead)).reshape(-1).view(np.float32)
    result = _step(flat, fields[0], fields[1], kind).reshape(lead)
    return result.view(np.uint32) if acc.dtype == np.uint32 else result


def chain(a: NDArray, b: NDArray, kind: str = "bf16") -> NDArray[np.float32]:
    """Sum over the last axis (a multiple of 16): blocks of 16 ascending, the accumulator starting at +0."""
    length = np.shape(a)[-1]
    if length % 16 or np.shape(b)[-1] != length:
        raise ValueError("a chain's length is a multiple of 16")
    acc = np.zeros(np.broadcast_shapes(np.shape(a)[:-1], np.shape(b)[:-1]), np.float32)
    for i in range(0, length, 16):
        acc = fsum16(acc, a[..., i : i + 16], b[..., i : i + 16], kind)
    return acc


def chains(x: NDArray, w: NDArray, kind: str = "bf16") -> NDArray[np.float32]:
    """Every pair's chain: ``x`` [B, T, K], ``w`` [B, N, K] -> fp32 [B, T, N]; K a multiple of 16, memory bounded."""
    batch, rows, length = x.shape
    columns = w.shape[1]
    if length % 16 or w.shape != (batch, columns, length):
        raise ValueError(f"shapes do not chain: {x.shape} and {w.shape}")
    out = np.zeros((batch, rows, columns), np.float32)
    step_n = max(1, min(columns, _TILE // (16 * batch)))
    step_t = max(1, _TILE // (16 * batch * step_n))
    for n in range(0, columns, step_n):
        right = _blocks(decode(w[:, n : n + step_n], kind), row_axis=3)
        for t in range(0, rows, step_t):
            left = _blocks(decode(x[:, t : t + step_t], kind), row_axis=4)
            acc = out[:, t : t + step_t, n : n + step_n].copy()
            for k in range(length // 16):
                acc = _step(acc, left.take(k), right.take(k), kind)
            out[:, t : t + step_t, n : n + step_n] = acc
    return out


def _blocks(x: Operand, row_axis: int) -> Operand:
    """Fields [B, rows, K] -> [K/16, 16, B, rows, 1] (row_axis 4) or [K/16, 16, B, 1, rows] (row_axis 3)."""

    def move(field: NDArray) -> NDArray:
        batch, rows, length = field.shape
        moved = field.reshape(batch, rows, length // 16, 16).transpose(2, 3, 0, 1)
        return np.ascontiguousarray(np.expand_dims(moved, row_axis))

    return Operand(*(move(field) for field in x))


def gemm(x: NDArray, w: NDArray) -> NDArray[np.float32]:
    """bf16 ``x`` [T, K] and ``w`` [N, K] -> fp32 [T, N]: eight segment chains, then tree8 (section 5)."""
    return canonical(tree8(chains(segments(x), segments(w))))
