"""Ops under JAX's transformations, their gradients, and their error messages."""

from __future__ import annotations

import re
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from op_helpers import normal, same

from muse_jax import ops

RNG = np.random.default_rng(20)
W = jnp.asarray(normal(RNG, 128, 128, scale=0.1))
GAIN = jnp.asarray(normal(RNG, 128, scale=0.1))
X = jnp.asarray(normal(RNG, 8, 128))
CHOSEN = jnp.asarray(np.argsort(RNG.random((8, 8)), axis=1)[:, :3].astype(np.int32))
W13 = jnp.asarray(normal(RNG, 8, 256, 128, scale=0.1))
W2 = jnp.asarray(normal(RNG, 8, 128, 128, scale=0.1))
ONES = jnp.ones(2, jnp.float32)


def block(x: jax.Array) -> jax.Array:
    """A few ops in a row, bf16 [..., 128] -> the same."""
    h = ops.rms_norm(x, GAIN, eps=1e-5)
    return ops.rms_norm(ops.gemm(h, W), eps=1e-8)


# --- Transformations --------------------------------------------------------------------------------------------------


def test_jit_gives_the_bits_of_eager() -> None:
    same(jax.jit(block)(X), block(X))


def test_leading_dimensions_are_free() -> None:
    same(block(X.reshape(2, 2, 2, 128)).reshape(8, 128), block(X))
    same(block(X[0]), block(X)[0])
    assert block(X[:0]).shape == (0, 128)


def test_scan_and_while_loop() -> None:
    expected = X
    for _ in range(3):
        expected = block(expected)
    scanned, _ = jax.jit(lambda x: jax.lax.scan(lambda c, _: (block(c), None), x, None, length=3))(X)
    same(scanned, expected)
    looped = jax.lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, block(c[1])), (0, X))
    same(looped[1], expected)


def test_vmap() -> None:
    same(jax.vmap(block)(X), block(X))
    weights = jnp.stack([W, W[::-1], W * 2])
    each = jnp.stack([ops.gemm(X, w) for w in weights])
    same(jax.vmap(ops.gemm, in_axes=(None, 0))(X, weights), each)
    grads = jax.vmap(jax.grad(lambda x: block(x).astype(jnp.float32).sum()))(X)
    same(grads[3], jax.grad(lambda x: block(x).astype(jnp.float32).sum())(X[3]))


@pytest.fixture(name="mesh")
def mesh_of_eight() -> Mesh:
    return Mesh(np.array(jax.devices()[:8]), ("rank",), axis_types=(AxisType.Auto,))


@pytest.mark.parametrize("check_vma", [True, False])
def test_shard_map(mesh: Mesh, check_vma: bool) -> None:
    """Rows over eight devices with replicated weights: the bits of one device, and summed weight gradients."""
    x = jax.device_put(X, NamedSharding(mesh, P("rank")))
    spread = jax.shard_map(
        lambda x, w: ops.gemm(block(x), w),
        mesh=mesh,
        in_specs=(P("rank"), P()),
        out_specs=P("rank"),
        check_vma=check_vma,
    )
    same(jax.jit(spread)(x, W), ops.gemm(block(X), W))

    def loss(f: Callable, x: jax.Array, w: jax.Array) -> jax.Array:
        return (f(x, w).astype(jnp.float32) ** 2).sum()

    actual = jax.jit(jax.grad(lambda w: loss(spread, x, w)))(W)
    expected = jax.grad(lambda w: loss(lambda x, w: ops.gemm(block(x), w), X, w))(W)
    np.testing.assert_allclose(*(np.asarray(g, np.float32) for g in (actual, expected)), rtol=0.05, atol=0.1)


def test_experts_over_eight_devices(mesh: Mesh) -> None:
    """Each device computes its own expert's pairs; the parts are disjoint and together the whole."""

    def local(x: jax.Array, chosen: jax.Array, w13: jax.Array, w2: jax.Array) -> jax.Array:
        first = jax.lax.axis_index("rank").astype(jnp.int32)
        return ops.expert_ffn(x, chosen, first, w13, w2)[None]

    spread = jax.shard_map(
        local, mesh=mesh, in_specs=(P(), P(), P("rank"), P("rank")), out_specs=P("rank"), check_vma=True
    )
    parts = np.asarray(jax.jit(spread)(X, CHOSEN, W13, W2))
    whole = np.asarray(ops.expert_ffn(X, CHOSEN, 0, W13, W2))
    owner = np.asarray(CHOSEN)
    for rank in range(8):
        same(parts[rank], np.where((owner == rank)[..., None], whole, np.zeros_like(whole)))


def test_remat_and_value_and_grad() -> None:
    loss = lambda x: (block(x).astype(jnp.float32) ** 3).sum()  # noqa: E731
    value, grad = jax.value_and_grad(loss)(X)
    value_2, grad_2 = jax.jit(jax.value_and_grad(jax.checkpoint(loss)))(X)
    np.testing.assert_allclose(value, value_2, rtol=1e-5)
    np.testing.assert_allclose(np.asarray(grad, np.float32), np.asarray(grad_2, np.float32), rtol=0.02, atol=1e-2)


# --- Gradients --------------------------------------------------------------------------------------------------------
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


# --- Errors -----------------------------------------------------------------------------------------------------------


def bf16(*shape: int) -> jax.Array:
    return jnp.zeros(shape, jnp.bfloat16)


def f32(*shape: int) -> jax.Array:
    return jnp.zeros(shape, jnp.float32)


def i32(*shape: int) -> jax.Array:
    return jnp.zeros(shape, jnp.int32)


def u8(*shape: int) -> jax.Array:
    return jnp.zeros(shape, jnp.uint8)


def e4m3(*shape: int) -> jax.Array:
    return jnp.zeros(shape, jnp.float8_e4m3fn)


def route_with(**changes: object) -> object:
    operands = {"h": bf16(2, 128), "w": f32(8, 128), "bias": f32(8), "experts_per_token": 2} | changes
    return ops.router(**operands, multiplier=1.0, scaling=1.0)  # type: ignore[arg-type]


def nvfp4_with(**changes: object) -> object:
    operands = {
        "x": bf16(2, 128),
        "experts": i32(2, 3),
        "first": 0,
        "w13": u8(4, 512, 64),
        "w13_scale": e4m3(4, 512, 8),
        "w13_scale_2": f32(4, 2),
        "w2": u8(4, 128, 128),
        "w2_scale": e4m3(4, 128, 16),
        "w2_scale_2": f32(4),
        "input_scales": f32(2),
    } | changes
    return ops.expert_ffn_nvfp4(**operands, quantize_activations=True)  # type: ignore[arg-type]


def attend_with(**changes: object) -> object:
    operands = {"q": bf16(3, 4, 64), "k": bf16(5, 2, 64), "v": bf16(5, 2, 64), "position": i32(3)} | changes
    return ops.attention(**operands, scale=1.0)  # type: ignore[arg-type]


ERRORS: list[tuple[Callable, type[Exception], str]] = [
    (lambda: ops.gemm(f32(2, 128), W), TypeError, "gemm: x has dtype float32, expected bfloat16; cast it first"),
    (lambda: ops.gemm(3.0, W), TypeError, "gemm: x is a float, expected an array of bfloat16"),
    (lambda: ops.gemm(bf16(), W), ValueError, "gemm: x has shape [], expected [..., K]"),
    (
        lambda: ops.gemm(bf16(2, 100), W),
        ValueError,
        "gemm: K (the reduced dimension) is 100, expected a positive multiple",
    ),
    (lambda: ops.gemm(bf16(2, 256), W), ValueError, "gemm: w has shape [128, 128], expected [N, 256]; w is [out"),
    (
        lambda: ops.gemm(X, W, out_dtype=jnp.float16),
        TypeError,
        "gemm: out_dtype is float16, expected bfloat16 or float32",
    ),
    (
        lambda: ops.gemm_w4a16(X, u8(4, 63), e4m3(4, 8), 1.0),
        ValueError,
        "codes has shape [4, 63], expected [N, 64]; two",
    ),
    (
        lambda: ops.gemm_w4a16(X, u8(4, 64), e4m3(4, 4), 1.0),
        ValueError,
        "scales has shape [4, 4], expected [4, 8]; one",
    ),
    (
        lambda: ops.gemm_w4a16(X, u8(4, 64), f32(4, 8), 1.0),
        TypeError,
        "scales has dtype float32, expected float8_e4m3fn",
    ),
    (
        lambda: ops.gemm_w4a16(X, u8(4, 64), e4m3(4, 8), f32(2)),
        ValueError,
        "gemm_w4a16: scale has shape [2], expected []",
    ),
    (
        lambda: ops.gemm_w4a4(u8(2, 64), e4m3(2, 4), u8(4, 64), e4m3(4, 8), 1.0, 1.0),
        ValueError,
        "gemm_w4a4: x_scales has shape [2, 4], expected [2, 8]; one scale per 16 elements of x",
    ),
    (lambda: ops.rms_norm(bf16(2, 64), eps=1e-5), ValueError, "rms_norm: the row length is 64, expected a positive"),
    (
        lambda: ops.rms_norm(X, bf16(64), eps=1e-5),
        ValueError,
        "rms_norm: gain has shape [64], expected [128]; one gain",
    ),
    (lambda: ops.rms_norm(i32(2, 128), eps=1.0), TypeError, "x has dtype int32, expected bfloat16 or float32"),
    (lambda: ops.rms_norm(X, eps=1.0, scale_first=True), ValueError, "scale_first needs a bfloat16 x and a gain"),
    (
        lambda: ops.q_norm_rope(bf16(3, 2, 32), eps=1.0),
        ValueError,
        "q_norm_rope: x has shape [3, 2, 32], expected [3, 2, 64]",
    ),
    (
        lambda: ops.q_norm_rope(bf16(3, 2, 64), f32(2, 64), eps=1.0),
        ValueError,
        "table has shape [2, 64], expected [3, 64]",
    ),
    (
        lambda: ops.kv_norm_rope(bf16(3, 2, 64), bf16(3, 1, 64), eps=1.0),
        ValueError,
        "kv_norm_rope: v has shape [3, 1, 64]",
    ),
    (lambda: ops.rope_table(4, 0.0), ValueError, "rope_table: theta is 0.0, expected a positive number"),
    (lambda: ops.rope_table(2**20 + 1, 1e4), ValueError, "rope_table: 1048577 positions, expected 0 to 1048576"),
    (
        lambda: attend_with(k=bf16(5, 3, 64), v=bf16(5, 3, 64)),
        ValueError,
        "q has 4 heads, expected a multiple of k's 3",
    ),
    (lambda: attend_with(v=bf16(4, 2, 64)), ValueError, "attention: v has shape [4, 2, 64], expected [5, 2, 64]"),
    (
        lambda: attend_with(position=i32(5)),
        ValueError,
        "attention: position has shape [5], expected [3]; one position per row",
    ),
    (lambda: attend_with(position=f32(3)), TypeError, "attention: position has dtype float32, expected int32"),
    (lambda: attend_with(window=0), ValueError, "attention: window is 0, expected a positive length, or None"),
    (lambda: attend_with(q=bf16(4, 64)), ValueError, "attention: q has shape [4, 64], expected [..., rows, heads, 64]"),
    (
        lambda: ops.attention_gate(bf16(3, 2, 64), bf16(3, 64), eps=1.0),
        ValueError,
        "u has shape [3, 64], expected [3, 128]",
    ),
    (lambda: ops.gate_coefficients(bf16(2, 2), temperature=1.0), ValueError, "gate has shape [2, 2], expected [H]"),
    (
        lambda: ops.residual(f32(2, 4), bf16(2, 5), f32(4), f32(4)),
        ValueError,
        "residual: n has shape [2, 5], expected [2, 4]",
    ),
    (
        lambda: ops.residual(f32(2, 4), bf16(2, 4), f32(4), f32(5)),
        ValueError,
        "residual: beta has shape [5], expected [4]",
    ),
    (
        lambda: route_with(w=f32(8, 256)),
        ValueError,
        "router: w has shape [8, 256], expected [E, 128]; one row per expert",
    ),
    (lambda: route_with(bias=f32(9)), ValueError, "router: bias has shape [9], expected [8]"),
    (lambda: route_with(experts_per_token=9), ValueError, "router: experts_per_token is 9, expected 1 to 8"),
    (
        lambda: ops.quantize(bf16(2, 24), 1.0),
        ValueError,
        "quantize: the row length is 24, expected a positive multiple of 16",
    ),
    (lambda: ops.quantize_weight(bf16(32)), ValueError, "quantize_weight: w has shape [32], expected [..., N, K]"),
    (
        lambda: ops.expert_ffn(X, i32(7, 3), 0, W13, W2),
        ValueError,
        "expert_ffn: experts has shape [7, 3], expected [8, K]",
    ),
    (
        lambda: ops.expert_ffn(X, CHOSEN, 0, W13, bf16(8, 128, 256)),
        ValueError,
        "w2 has shape [8, 128, 256], expected [8, 128, 1",
    ),
    (
        lambda: ops.expert_ffn(X, CHOSEN, 0, bf16(8, 255, 128), W2),
        ValueError,
        "w13 has 255 rows per expert, expected gate",
    ),
    (
        lambda: ops.expert_ffn(X, CHOSEN, f32(), W13, W2),
        TypeError,
        "expert_ffn: first has dtype float32, expected int32",
    ),
    (
        lambda: nvfp4_with(w13_scale=e4m3(4, 512, 4)),
        ValueError,
        "w13_scale has shape [4, 512, 4], expected [4, 512, 8]",
    ),
    (
        lambda: nvfp4_with(w2=u8(4, 128, 64)),
        ValueError,
        "expert_ffn_nvfp4: w2 has shape [4, 128, 64], expected [4, 128, 128]",
    ),
    (lambda: nvfp4_with(w13_scale_2=f32(4)), ValueError, "w13_scale_2 has shape [4], expected [4, 2]"),
    (lambda: nvfp4_with(input_scales=f32(3)), ValueError, "input_scales has shape [3], expected [2]; one scale for x"),
    (
        lambda: ops.combine(F, f32(8, 2), CHOSEN, GAIN, eps=1.0),
        ValueError,
        "combine: weights has shape [8, 2], expected [8, 3]",
    ),
    (
        lambda: ops.combine(bf16(1, 65, 128), f32(1, 65), i32(1, 65), GAIN, eps=1.0),
        ValueError,
        "f has 65 experts per token",
    ),
    (
        lambda: ops.head(X, bf16(9, 64), multiplier=1.0, cap=1.0),
        ValueError,
        "head: w has shape [9, 64], expected [V, 128]",
    ),
    (
        lambda: ops.log_prob(f32(2, 12), i32(2)),
        ValueError,
        "log_prob: the vocabulary is 12, expected a positive multiple of 8",
    ),
    (
        lambda: ops.log_prob(f32(2, 16), i32(3)),
        ValueError,
        "log_prob: token has shape [3], expected [2]; one token per row",
    ),
    (
        lambda: ops.numerics("cos", f32(2)),
        ValueError,
        "numerics: 'cos' is none of the contract's functions, expected exp, ",
    ),
    (lambda: ops.numerics("fma", f32(2)), ValueError, "numerics: fma takes 3 operands, got 1"),
    (lambda: ops.numerics("exp", bf16(2)), TypeError, "numerics exp: operand 0 has dtype bfloat16, expected float32"),
]


@pytest.mark.parametrize(("make", "kind", "message"), ERRORS, ids=[message[:40] for _, _, message in ERRORS])
def test_error_says_what_was_given_and_what_is_allowed(make: Callable, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=re.escape(message)):
        make()


HANDLER_ERRORS = [
    ("muse_gemm_v1", f32(2, 4), (bf16(2, 100), bf16(4, 100)), {}, "gemm: K (the reduced dimension) is 100"),
    ("muse_gemm_v1", f32(2, 4), (bf16(2, 128), bf16(5, 128)), {}, "gemm: w has shape [5, 128], expected [4, 128]"),
    (
        "muse_residual_v1",
        f32(2, 4),
        (f32(2, 4), bf16(2, 4), f32(5), f32(4)),
        {},
        "residual: alpha has shape [5], expected [4]",
    ),
    ("muse_numerics_v1", f32(4), (f32(4),), {"function": np.int64(99)}, "numerics: function is 99"),
    ("muse_numerics_v1", f32(4), (f32(5),), {"function": np.int64(0)}, "numerics: operand 0 has the wrong size"),
    ("muse_log_prob_v1", f32(2), (f32(2, 12), i32(2)), {}, "log_prob: the vocabulary is 12"),
]


@pytest.mark.parametrize(("target", "result", "operands", "attributes", "message"), HANDLER_ERRORS)
def test_handlers_check_for_themselves(
    target: str, result: jax.Array, operands: tuple, attributes: dict, message: str
) -> None:
    with pytest.raises(Exception, match=re.escape(message)):
        jax.block_until_ready(
            jax.ffi.ffi_call(target, jax.ShapeDtypeStruct(result.shape, result.dtype))(*operands, **attributes)
        )
