"""RoPE, the KV cache rule and attention (contract sections 3 and 7, "Attention").

A row of a draft tree sees, above the committed length, only its own ancestors at their positions, and its bits are
those of plain decoding: to get them, run ``forward`` on the path (committed tokens, then the ancestors) as a sequence.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from .elementary import exp
from .formats import NAN16, R, bfloat16, widen
from .fsum16 import chains

CHUNK = 128
SUPER_CHUNK = 2048


def rope_table(positions: NDArray, theta: float) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """cos and sin, fp32 [T, 32] each, of the fp32 angles ``fp32(position) * f_i``."""
    powers = np.power(np.float64(theta), np.arange(32, dtype=np.float64) * 2 / 64)
    frequency = np.float32(1) / powers.astype(np.float32)
    angle = (positions.astype(np.float32)[:, None] * frequency).astype(np.float64)
    return np.cos(angle).astype(np.float32), np.sin(angle).astype(np.float32)


@np.errstate(all="ignore")
def rotate(x: NDArray, cos: NDArray, sin: NDArray) -> NDArray:
    """bf16 [T, heads, 64], adjacent pairs rotated, three fp32 roundings and one R -> bf16."""
    a, b = widen(x[..., 0::2]), widen(x[..., 1::2])
    cos, sin = cos[:, None, :], sin[:, None, :]
    return np.stack([R(a * cos - b * sin), R(a * sin + b * cos)], axis=-1).reshape(x.shape)


def cached(k: NDArray, v: NDArray) -> tuple[NDArray, NDArray]:
    """k and v as stored, bf16 [T, kv_heads, 64]: a (position, head) with a NaN or infinity is k = NaNs, v = zeros."""
    bad = ~(np.isfinite(widen(k)).all(axis=-1) & np.isfinite(widen(v)).all(axis=-1))[..., None]
    nan = NAN16.view(bfloat16)
    return np.where(bad, nan, k), np.where(bad, bfloat16(0), v)


def attend(q: NDArray, k: NDArray, v: NDArray, qk_scale_factor: float, window: int | None) -> NDArray:
    """Positions 0..T-1: bf16 q [T, heads, 64], cached k and v [T, kv_heads, 64] -> a [T, heads, 64] bf16.

    Query head h reads kv head h // (heads / kv_heads). ``window`` is None on full layers.
    """
    length, heads, _ = q.shape
    group, pad = heads // k.shape[1], -length % CHUNK
    keys = np.repeat(k.transpose(1, 0, 2), group, axis=0)
    values = np.repeat(v.transpose(1, 2, 0), group, axis=0)
    values = np.concatenate([values, np.ones((heads, 1, length), bfloat16)], axis=1)  # the ones give the denominator
    values = np.pad(values, ((0, 0), (0, 0), (0, pad)))
    scale = np.float32(np.float64(qk_scale_factor) / 8)
    queries = q.transpose(1, 0, 2)
    rows = [_attend_rows(queries, keys, values, scale, window, t) for t in range(0, length, CHUNK)]
    return np.concatenate(rows, axis=1).transpose(1, 0, 2)


@np.errstate(all="ignore")
def _attend_rows(
    q: NDArray, keys: NDArray, values: NDArray, scale: np.float32, window: int | None, start: int
) -> NDArray:
    """Queries at positions start..start+127 of q [heads, T, 64]; keys [heads, T, 64], values [heads, 65, padded T].

    No running maximum. Numerators and the denominator are fsum16 chains over chunks of 128 absolute positions; chunk
    sums are added within 2048 positions, and those sums to the total.
    """
    heads, length, _ = q.shape
    stop = min(start + CHUNK, length)
    distance = np.arange(start, stop)[:, None] - np.arange(stop)[None, :]
    seen = (distance >= 0) & (distance < (stop if window is None else window))
    score = chains(q[:, start:stop], keys[:, :stop])
    p = np.where(seen, R(exp(score * scale)), bfloat16(0))
    p = np.pad(p, ((0, 0), (0, 0), (0, -stop % CHUNK)))
    total = np.zeros((heads, stop - start, 65), np.float32)
    for outer in range(0, stop, SUPER_CHUNK):
        part = np.zeros_like(total)
        for c in range(outer, min(outer + SUPER_CHUNK, stop), CHUNK):
            part = part + chains(p[..., c : c + CHUNK], values[..., c : c + CHUNK])
        total = total + part
    return R(total[..., :64] / total[..., 64:])
