"""Attention of whole sequences, and the gate after it (docs/numerics.md 7, Attention 5 to 8)."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from muse_jax.ops._call import (
    BF16,
    I32,
    Array,
    Op,
    call,
    check_dtype,
    check_rank,
    check_shape,
    einsum,
    f32,
    flatten,
    struct,
)


def _attention(q: Array, k: Array, v: Array, position: Array, *, scale: np.float32, window: int) -> Array:
    result = struct(q.shape, BF16)
    return call("muse_attention_v1", result, q, k, v, position, scale=scale, window=np.int64(window))


def _attention_twin(q: Array, k: Array, v: Array, position: Array, *, scale: np.float32, window: int) -> Array:
    batch, rows, heads, _ = q.shape
    grouped = f32(q).reshape(batch, rows, k.shape[2], heads // k.shape[2], 64)
    distance = position[:, None] - jnp.arange(k.shape[1])[None, :]
    seen = (distance >= 0) & ((distance < window) if window else True)
    score = jnp.where(seen, einsum("btngd,bsnd->bngts", grouped, f32(k)) * scale, 0)
    p = jnp.where(seen, jnp.exp(score), 0)
    a = einsum("bngts,bsnd->btngd", p, f32(v)) / jnp.moveaxis(p.sum(-1), 3, 1)[..., None]
    return a.reshape(q.shape).astype(jnp.bfloat16)


def _gate(a: Array, u: Array, *, eps: np.float32) -> Array:
    return call("muse_attention_gate_v1", struct(u.shape, BF16), a, u, eps=eps)


def _gate_twin(a: Array, u: Array, *, eps: np.float32) -> Array:
    y = f32(a) * jax.lax.rsqrt(jnp.mean(f32(a) ** 2, axis=-1, keepdims=True) + eps)
    return (y.reshape(u.shape) * jax.nn.sigmoid(f32(u))).astype(jnp.bfloat16)


_ATTENTION = Op(_attention, _attention_twin, wrt=(0, 1, 2))
_GATE = Op(_gate, _gate_twin, wrt=(0, 1))


def attention(q: Array, k: Array, v: Array, position: Array, *, scale: float, window: int | None = None) -> Array:
    """Attention of normalised queries over keys at positions 0 .. S-1.

    ``q`` bf16 [..., T, heads, 64]; ``k``, ``v`` bf16 [..., S, kv heads, 64] as ``kv_norm_rope`` returns them; heads a
    multiple of kv heads; ``position`` int32 [T]: row t sees keys ``j <= position[t]``, with ``window`` only those with
    ``position[t] - j < window``. ``scale`` is qk_scale_factor / 8. -> bf16 like ``q``; a row that sees no key is NaN.
    Gradients flow to q, k and v (the twin holds all scores at once). Contract section 7, Attention 5 to 7.
    """
    op = "attention"
    for name, x in (("q", q), ("k", k), ("v", v)):
        check_dtype(op, name, x, BF16)
        check_rank(op, name, x, 3, "[..., rows, heads, 64]")
    check_shape(op, "q", q, *q.shape[:-1], 64)
    check_shape(op, "k", k, *q.shape[:-3], "S", "kv heads", 64, hint="k has the leading dimensions of q")
    check_shape(op, "v", v, *k.shape, hint="v has the shape of k")
    check_dtype(op, "position", position, I32)
    check_shape(op, "position", position, q.shape[-3], hint="one position per row of q")
    if not k.shape[-2] or q.shape[-2] % k.shape[-2]:
        raise ValueError(f"{op}: q has {q.shape[-2]} heads, expected a multiple of k's {k.shape[-2]}")
    if window is not None and window < 1:
        raise ValueError(f"{op}: window is {window}, expected a positive length, or None for full attention")
    operands = (flatten(q, 3), flatten(k, 3), flatten(v, 3), jnp.asarray(position))
    return _ATTENTION(*operands, scale=np.float32(scale), window=int(window or 0)).reshape(q.shape)


def attention_gate(a: Array, u: Array, *, eps: float) -> Array:
    """Normalise every head of ``a`` and multiply by ``sigmoid(u)``.

    ``a`` bf16 [..., heads, 64], ``u`` bf16 [..., heads * 64] -> bf16 like ``u``. Gradients flow to both. Contract
    section 7, Attention 8.
    """
    op = "attention_gate"
    check_dtype(op, "a", a, BF16)
    check_rank(op, "a", a, 2, "[..., heads, 64]")
    check_shape(op, "a", a, *a.shape[:-1], 64)
    check_dtype(op, "u", u, BF16)
    check_shape(op, "u", u, *a.shape[:-2], a.shape[-2] * 64, hint="one gate per element of a")
    return _GATE(flatten(a, 2), flatten(u, 1), eps=np.float32(eps)).reshape(u.shape)
