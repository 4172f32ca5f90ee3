"""Gradients of the ops: those of the fp64 functions that they approximate."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from op_helpers import normal, same
from op_operands import CHOSEN, GAIN, RNG, W2, W13, W, X

from muse_jax import ops

ONES = jnp.ones(2, jnp.float32)

# Each case: the op as a function of its differentiable operands; the same function in NumPy, fp64; the operands.


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def unit(x: np.ndarray, eps: float) -> np.ndarray:
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps)


def rotated(x: np.ndarray, table: np.ndarray) -> np.ndarray:
    cos, sin = table[:, None, :32], table[:, None, 32:]
    a, b = x[..., 0::2], x[..., 1::2]
    return np.stack([a * cos - b * sin, a * sin + b * cos], -1).reshape(x.shape)


def attend(q: np.ndarray, k: np.ndarray, v: np.ndarray, window: int) -> np.ndarray:
    k, v = (np.repeat(x, q.shape[1] // x.shape[1], axis=1) for x in (k, v))
    score = np.einsum("tnd,snd->nts", q, k) * 0.3
    distance = np.arange(len(q))[:, None] - np.arange(len(k))
    p = np.exp(score) * ((distance >= 0) & (distance < window))
    return np.einsum("nts,snd->tnd", p / p.sum(-1, keepdims=True), v)


def experts(x: np.ndarray, w13: np.ndarray, w2: np.ndarray) -> np.ndarray:
    f = np.zeros((8, 3, 128))
    for t, slot in np.ndindex(8, 3):
        e = int(CHOSEN[t, slot]) - 2
        if 0 <= e < 4:
            gate, up = np.split(w13[e] @ x[t], 2)
            f[t, slot] = w2[e] @ (gate * sigmoid(gate) * up)
    return f


def dequantized(w: np.ndarray, groups: int) -> np.ndarray:
    """A bf16 weight [E, N, K] after quantisation, as fp64; `groups` tensors per expert."""
    split = np.asarray(w).reshape(len(w), groups, -1, w.shape[-1])
    codes, scales, scale_2 = (np.asarray(a) for a in ops.quantize_weight(jnp.asarray(split)))
    values = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    nibbles = np.stack([codes & 15, codes >> 4], -1).reshape(split.shape)
    value = np.where(nibbles & 8, -1, 1) * values[nibbles & 7]
    return (value * np.repeat(scales.astype(float), 16, -1) * scale_2[..., None, None].astype(float)).reshape(w.shape)


def route(h: np.ndarray, w: np.ndarray) -> np.ndarray:
    logits = h @ w.T * 0.2
    chosen = np.asarray(ROUTED)
    p = np.take_along_axis(sigmoid(logits), chosen, 1)
    return np.concatenate([p / p.sum(1, keepdims=True) * 2.5, logits], axis=1)


def routed(h: jax.Array, w: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    return ops.router(h, w, jnp.arange(10, dtype=jnp.float32) / 10, experts_per_token=3, multiplier=0.2, scaling=2.5)


HEADS = jnp.asarray(normal(RNG, 8, 4, 64))
KV = [jnp.asarray(normal(RNG, 8, 2, 64, scale=0.5)) for _ in range(2)]
TABLE = ops.rope_table(8, 1e4)
POSITION = jnp.arange(8, dtype=jnp.int32)
F32 = [
    jnp.asarray(RNG.normal(size=s).astype(np.float32)) for s in ((8, 128), (128,), (128,), (10, 128), (8, 3), (8, 64))
]
STREAM, ALPHA, BETA, ROUTER_W, COMBINE_W, LOGITS = F32
ROUTED = routed(X, ROUTER_W)[0]
F = jnp.asarray(normal(RNG, 8, 3, 128))
CODES, SCALES, WS2 = ops.quantize_weight(W)
LOCAL = (W13[2:6], W2[2:6])
NVFP4 = [a for w, groups in ((LOCAL[0], 2), (LOCAL[1], 1)) for a in ops.quantize_weight(w.reshape(4, groups, -1, 128))]
NVFP4 = [a.reshape(4, -1, a.shape[-1]) if a.ndim == 4 else a for a in NVFP4]
NVFP4[5] = NVFP4[5].reshape(4)
TOKEN = jnp.asarray(RNG.integers(0, 64, 8), jnp.int32)
Q13, Q2 = dequantized(LOCAL[0], 2), dequantized(LOCAL[1], 1)

CASES: dict[str, tuple[Callable, Callable, list]] = {
    "gemm": (ops.gemm, lambda x, w: x @ w.T, [X, W]),
    "gemm_w4a16": (
        lambda x: ops.gemm_w4a16(x, CODES, SCALES, WS2, out_dtype=jnp.float32),
        lambda x: x @ dequantized(W[None], 1)[0].T,
        [X],
    ),
    "rms_norm": (
        lambda x, g: ops.rms_norm(x, g, eps=1e-5),
        lambda x, g: unit(x, 1e-5) * (1 + g),
        [STREAM, GAIN],
    ),
    "rms_norm plain": (
        lambda x, g: ops.rms_norm(x, g, eps=1e-5, centred=False, round_input=True),
        lambda x, g: unit(x, 1e-5) * g,
        [STREAM, GAIN],
    ),
    "rms_norm without gain": (lambda x: ops.rms_norm(x, eps=1e-5), lambda x: unit(x, 1e-5), [X]),
    "rms_norm scale first": (
        lambda x, g: ops.rms_norm(x, g, eps=1e-8, scale_first=True),
        lambda x, g: unit(x * (1 + g), 1e-8),
        [X, GAIN],
    ),
    "q_norm_rope": (
        lambda x: ops.q_norm_rope(x, TABLE, eps=1e-5),
        lambda x: rotated(unit(x, 1e-5), TABLE),
        [HEADS],
    ),
    "kv_norm_rope": (
        lambda k, v: jnp.stack(ops.kv_norm_rope(k, v, eps=1e-5)),
        lambda k, v: np.stack([unit(k, 1e-5), v]),
        KV,
    ),
    "attention": (
        lambda q, k, v: ops.attention(q, k, v, POSITION, scale=0.3, window=5),
        lambda q, k, v: attend(q, k, v, 5),
        [HEADS * 0.5, *KV],
    ),
    "attention_gate": (
        lambda a, u: ops.attention_gate(a, u, eps=1e-5),
        lambda a, u: unit(a, 1e-5).reshape(u.shape) * sigmoid(u),
        [HEADS[:, :2], X],
    ),
    "gate_coefficients": (
        lambda g: jnp.stack(ops.gate_coefficients(g, temperature=0.7)),
        lambda g: np.stack([np.sqrt(sigmoid(-g / 0.7) * (1 + sigmoid(g / 0.7))), sigmoid(g / 0.7)]),
        [GAIN],
    ),
    "residual": (ops.residual, lambda s, n, a, b: a * s + b * n, [STREAM, X, ALPHA, BETA]),
    "router": (lambda h, w: jnp.concatenate(routed(h, w)[1:], axis=1), route, [X, ROUTER_W]),
    "expert_ffn": (lambda x, *w: ops.expert_ffn(x, CHOSEN, 2, *w), experts, [X, *LOCAL]),
    "expert_ffn_nvfp4": (
        lambda x: ops.expert_ffn_nvfp4(x, CHOSEN, 2, *NVFP4, ONES, quantize_activations=False),
        lambda x: experts(x, Q13, Q2),
        [X],
    ),
    "combine": (
        lambda f, c, g: ops.combine(f, c, CHOSEN, g, eps=1e-8),
        lambda f, c, g: np.einsum("tk,tkm->tm", c, unit(f * (1 + g), 1e-8)),
        [F, COMBINE_W, GAIN],
    ),
    "head": (
        lambda h, w: ops.head(h, w, multiplier=0.3, cap=5.0),
        lambda h, w: 5 * np.tanh(h @ w.T * 0.3 / 5),
        [X, W],
    ),
    "log_prob": (
        lambda z: ops.log_prob(z, TOKEN),
        lambda z: z[np.arange(8), np.asarray(TOKEN)] - np.log(np.exp(z).sum(1)),
        [LOGITS],
    ),
}


def as_float(x: object) -> np.ndarray:
    return np.asarray(x).astype(np.float64)


@pytest.mark.parametrize("name", list(CASES))
def test_gradient(name: str) -> None:
    """The op approximates the fp64 function, and its gradient that function's central differences."""
    op, function, operands = CASES[name]
    exact = [as_float(x) for x in operands]
    expected = function(*exact)
    np.testing.assert_allclose(as_float(op(*operands)), expected, atol=0.03 * np.abs(expected).max())
    rng = np.random.default_rng(21)
    weight = rng.normal(size=expected.shape)

    def loss(*args: jax.Array) -> jax.Array:
        return (op(*args).astype(jnp.float32) * jnp.asarray(weight, jnp.float32)).sum()

    gradients = jax.grad(loss, argnums=tuple(range(len(operands))))(*operands)
    for i, g in enumerate(gradients):
        assert g.dtype == operands[i].dtype
        for _ in range(3):
            direction = rng.normal(size=exact[i].shape) * 1e-5
            moved = [
                (function(*exact[:i], exact[i] + sign * direction, *exact[i + 1 :]) * weight).sum() for sign in (1, -1)
            ]
            slope, scale = (moved[0] - moved[1]) / 2, np.linalg.norm(as_float(g)) * 1e-5
            assert abs((as_float(g) * direction).sum() - slope) < 0.03 * scale, (i, slope)


def test_masters_pass_the_gradient_of_the_quantised_weights() -> None:
    def loss(x: jax.Array, w13: jax.Array, w2: jax.Array) -> jax.Array:
        f = ops.expert_ffn_masters(x, CHOSEN, 2, w13, w2, ONES / 100, quantize_activations=True)
        return (f.astype(jnp.float32) ** 2).sum()

    def quantised(x: jax.Array, w13: jax.Array, w2: jax.Array) -> jax.Array:
        f = ops.expert_ffn(x, CHOSEN, 2, w13, w2)
        forward = ops.expert_ffn_masters(x, CHOSEN, 2, *LOCAL, ONES / 100, quantize_activations=True)
        return (f.astype(jnp.float32) * 2 * jax.lax.stop_gradient(forward.astype(jnp.float32))).sum()

    actual = jax.grad(loss, argnums=(0, 1, 2))(X, *LOCAL)
    seen = [jnp.asarray(w, jnp.bfloat16) for w in (Q13, Q2)]
    expected = jax.grad(quantised, argnums=(0, 1, 2))(X, *seen)
    for a, e in zip(actual, expected, strict=True):
        assert a.dtype == jnp.bfloat16
        assert np.abs(as_float(e)).max() > 0
        np.testing.assert_allclose(as_float(a), as_float(e), atol=0.02 * np.abs(as_float(e)).max())


@pytest.mark.parametrize("share", [0.0, 0.25, 0.9, 1.0])
def test_expert_gradients_whatever_the_loads(share: float) -> None:
    """As of plain products, from no pair at one of the local experts to all of them."""
    rng = np.random.default_rng(22)
    x, dy = (jnp.asarray(normal(rng, *shape)) for shape in ((150, 128), (150, 2, 128)))
    crowded = jnp.asarray(np.where(rng.random((150, 2)) < share, 3, rng.choice([2, 4, 6], (150, 2))), jnp.int32)

    def plain(x: jax.Array, w13: jax.Array, w2: jax.Array) -> jax.Array:
        gate, up = jnp.split(jnp.einsum("tm,enm->ten", x, w13), 2, axis=-1)
        f = jnp.einsum("ten,emn->tem", jax.nn.silu(gate) * up, w2)
        return jnp.where(crowded[..., None] < 6, f[jnp.arange(150)[:, None], jnp.minimum(crowded - 2, 3)], 0)

    wide = [a.astype(jnp.float32) for a in (x, *LOCAL)]
    expected = jax.vjp(plain, *wide)[1](dy.astype(jnp.float32))
    actual = jax.vjp(lambda *a: ops.expert_ffn(a[0], crowded, 2, *a[1:]), x, *LOCAL)[1](dy)
    for a, e in zip(actual, expected, strict=True):
        np.testing.assert_allclose(as_float(a), as_float(e), atol=0.005 * np.abs(as_float(e)).max())


def test_operands_without_a_gradient_get_zeros() -> None:
    bias = jnp.zeros(10, jnp.float32)
    grad = jax.grad(lambda b: ops.router(X, ROUTER_W, b, experts_per_token=3, multiplier=1.0, scaling=1.0)[1].sum())(
        bias
    )
    same(grad, np.zeros(10, np.float32))
    grad = jax.grad(lambda s: ops.gemm_w4a16(X, CODES, SCALES, s, out_dtype=jnp.float32).sum())(WS2)
    same(grad, np.float32(0))
    codes_grad = jax.grad(lambda c: ops.gemm_w4a16(X, c, SCALES, WS2, out_dtype=jnp.float32).sum(), allow_int=True)(
        CODES
    )
    assert codes_grad.dtype == jax.dtypes.float0
