"""Head norm and RoPE of queries and keys, and the RoPE table (docs/numerics.md 3 and 7, Attention 3 and 4)."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from muse_jax import _cpu
from muse_jax.ops._call import BF16, F32, Array, Op, call, check_dtype, check_rank, check_shape, f32, flatten, struct


def _norm_rope(x: Array, table: Array, eps: np.float32, rotate: bool) -> Array:
    y = f32(x) * jax.lax.rsqrt(jnp.mean(f32(x) ** 2, axis=-1, keepdims=True) + eps)
    if rotate:
        cos, sin = table[:, None, :32], table[:, None, 32:]
        a, b = y[..., 0::2], y[..., 1::2]
        y = jnp.stack([a * cos - b * sin, a * sin + b * cos], axis=-1).reshape(x.shape)
    return y.astype(jnp.bfloat16)


def _q(x: Array, table: Array, *, eps: np.float32, rotate: bool) -> Array:
    return call("muse_q_norm_rope_v1", struct(x.shape, BF16), x, table, eps=eps, rotate=np.bool_(rotate))


def _q_twin(x: Array, table: Array, *, eps: np.float32, rotate: bool) -> Array:
    return _norm_rope(x, table, eps, rotate)


def _kv(k: Array, v: Array, table: Array, *, eps: np.float32, rotate: bool) -> list[Array]:
    results = [struct(k.shape, BF16), struct(v.shape, BF16)]
    return call("muse_kv_norm_rope_v1", results, k, v, table, eps=eps, rotate=np.bool_(rotate))


def _kv_twin(k: Array, v: Array, table: Array, *, eps: np.float32, rotate: bool) -> list[Array]:
    return [_norm_rope(k, table, eps, rotate), v]


_Q = Op(_q, _q_twin, wrt=(0,))
_KV = Op(_kv, _kv_twin, wrt=(0, 1))


def _table(op: str, x: Array, name: str, table: Array | None) -> tuple[Array, bool]:
    check_dtype(op, name, x, BF16)
    check_rank(op, name, x, 2, "[..., heads, 64]")
    check_shape(op, name, x, *x.shape[:-1], 64)
    if table is None:
        return jnp.zeros((0, 64), F32), False
    check_dtype(op, "table", table, F32)
    check_shape(op, "table", table, *x.shape[:-2], 64, hint=f"one row of rope_table per row of {name}")
    return flatten(jnp.asarray(table), 1), True


def q_norm_rope(x: Array, table: Array | None = None, *, eps: float) -> Array:
    """Normalise every head of the queries and rotate adjacent pairs.

    ``x`` bf16 [..., heads, 64]; ``table`` fp32 [..., 64], the row of ``rope_table`` for each row's position, or None on
    layers without RoPE -> bf16 like ``x``. The gradient flows to ``x``. Contract section 7, Attention 3.
    """
    rows, rotate = _table("q_norm_rope", x, "x", table)
    return _Q(flatten(x, 2), rows, eps=np.float32(eps), rotate=rotate).reshape(x.shape)


def kv_norm_rope(k: Array, v: Array, table: Array | None = None, *, eps: float) -> tuple[Array, Array]:
    """Keys and values as the cache stores them.

    ``k``, ``v`` bf16 [..., kv heads, 64], ``table`` as in ``q_norm_rope`` -> ``k`` normalised and rotated, ``v`` as it
    is; where either holds a NaN or an infinity, that position's ``k`` is all NaN and its ``v`` zero. Gradients flow to
    both. Contract section 7, Attention 3 and 4.
    """
    rows, rotate = _table("kv_norm_rope", k, "k", table)
    check_dtype("kv_norm_rope", "v", v, BF16)
    check_shape("kv_norm_rope", "v", v, *k.shape, hint="v has the shape of k")
    k_cached, v_cached = _KV(flatten(k, 2), flatten(v, 2), rows, eps=np.float32(eps), rotate=rotate)
    return k_cached.reshape(k.shape), v_cached.reshape(v.shape)


def rope_table(positions: int, theta: float) -> np.ndarray:
    """fp32 [positions, 64] for positions 0 .. positions-1: 32 cosines, then 32 sines.

    At most 2**20 positions, ``theta`` positive. Built on the host and the same on every machine. Contract section 3.
    """
    if not theta > 0:
        raise ValueError(f"rope_table: theta is {theta}, expected a positive number; layers without RoPE need no table")
    return _cpu.rope_table(int(positions), float(theta))
