"""Every op's CUDA handler against the CPU's: no differing byte."""

import functools

import jax
import numpy as np
import pytest
from op_helpers import BF16, normal, random_floats, same, wild

from muse_jax import ops

E4M3 = jax.numpy.float8_e4m3fn
EPS, POST_EPS = 1e-5, 1e-8
F32 = np.float32


def agree(on_both, function, *operands, **static):
    device, host = on_both(functools.partial(function, **static), *operands)
    device, host = jax.tree.leaves(device), jax.tree.leaves(host)
    assert len(device) == len(host) > 0
    for d, h in zip(device, host, strict=True):
        same(d, h)


def scales(rng, *shape):
    """e4m3 scales: mostly ordinary ones, a few of any bits (negative, NaN, subnormal)."""
    bits = np.where(rng.random(shape) < 0.003, rng.integers(0, 256, shape), rng.integers(32, 100, shape))
    return bits.astype(np.uint8).view(E4M3)


def codes(rng, *shape):
    return rng.integers(0, 256, shape, dtype=np.uint8)


def uneven(rng, *shape):
    """Mostly ordinary rows; one in eight has wild elements, so that most results stay finite."""
    x = normal(rng, *shape)
    rows = rng.random(shape[:-1]) < 0.125
    x[rows] = wild(rng, *shape)[rows]
    return x


# GEMM ----------------------------------------------------------------------------------------------------------------

# Rows, columns, K: for each of the three tiles, ragged edges, and segments of 1, 3, 4, 5, 9, 64 blocks of sixteen.
SHAPES = [
    (1, 8, 128), (3, 17, 384), (16, 64, 512), (7, 1000, 8192), (17, 100, 128), (65, 129, 640), (33, 4096, 1152),
    (40, 300, 8192), (1100, 1900, 128), (1090, 1817, 384), (1025, 2001, 1152), (700, 3001, 512),
]  # fmt: skip


@pytest.mark.parametrize("out", [BF16, F32])
@pytest.mark.parametrize(("t", "n", "k"), SHAPES)
def test_gemm(on_both, t, n, k, out):
    rng = np.random.default_rng(t * n)
    agree(on_both, ops.gemm, uneven(rng, t, k), uneven(rng, n, k), out_dtype=out)


@pytest.mark.parametrize("width", [0, 20, 250])
def test_gemm_of_spread_exponents(on_both, width):
    """Truncation, subnormal sums and overflow decide bits."""
    rng = np.random.default_rng(width)

    def spread(*shape):
        exponents = 127 + rng.integers(-(width // 2), width // 2 + 1, shape)
        return ((exponents << 7) | rng.integers(0, 128, shape) | rng.integers(0, 2, shape) << 15).astype(np.uint16)

    agree(on_both, ops.gemm, spread(90, 1024).view(BF16), spread(333, 1024).view(BF16), out_dtype=F32)


@pytest.mark.parametrize("out", [BF16, F32])
@pytest.mark.parametrize(("t", "n", "k"), SHAPES)
def test_gemm_w4a16(on_both, t, n, k, out):
    rng = np.random.default_rng(t * n + 1)
    agree(on_both, ops.gemm_w4a16, uneven(rng, t, k), codes(rng, n, k // 2), scales(rng, n, k // 16), F32(0.0037),
          out_dtype=out)  # fmt: skip


@pytest.mark.parametrize("out", [BF16, F32])
@pytest.mark.parametrize(("t", "n", "k"), SHAPES)
def test_gemm_w4a4(on_both, t, n, k, out):
    rng = np.random.default_rng(t * n + 2)
    operands = codes(rng, t, k // 2), scales(rng, t, k // 16), codes(rng, n, k // 2), scales(rng, n, k // 16)
    agree(on_both, ops.gemm_w4a4, *operands, F32(0.0037), F32(0.19), out_dtype=out)


# Norms, heads, residual ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [128, 384, 4096, 8192])
def test_rms_norm(on_both, n):
    rng = np.random.default_rng(n)
    x, gain = uneven(rng, 37, n), normal(rng, n, scale=0.3)
    stream = uneven(rng, 37, n).astype(F32) * rng.normal(1, 0.1, (37, n)).astype(F32)
    stream[3, 5], stream[4, 6], stream[5] = np.nan, np.inf, random_floats(n, n)
    for inputs in (x, stream):
        agree(on_both, lambda x: ops.rms_norm(x, eps=EPS), inputs)
        agree(on_both, ops.rms_norm, inputs, gain, eps=EPS)
        agree(on_both, ops.rms_norm, inputs, gain, eps=EPS, centred=False, round_input=True)
    agree(on_both, ops.rms_norm, x, gain, eps=POST_EPS, scale_first=True)


@pytest.mark.parametrize(("t", "n"), [(1, 1), (5, 3), (67, 16), (33, 128)])
def test_heads(on_both, t, n):
    rng = np.random.default_rng(t)
    k, v = wild(rng, t, n, 64), wild(rng, t, n, 64)
    table = ops.rope_table(100_000 + t, 500000.0)[-t:]
    for rows in (None, table):
        agree(on_both, ops.q_norm_rope, k, rows, eps=EPS)
        agree(on_both, ops.kv_norm_rope, k, v, rows, eps=EPS)
    agree(on_both, ops.attention_gate, wild(rng, t, n, 64), wild(rng, t, n * 64), eps=EPS)


@pytest.mark.parametrize(("t", "n"), [(1, 128), (9, 130), (50, 8192)])
def test_residual(on_both, t, n):
    rng = np.random.default_rng(n)
    gate = wild(rng, n)
    agree(on_both, ops.gate_coefficients, gate, temperature=0.3)
    s = rng.normal(size=(t, n)).astype(F32)
    s[0, :100] = random_floats(1, 200)[:100]
    alpha, beta = (rng.random(n).astype(F32) for _ in range(2))
    agree(on_both, ops.residual, s, wild(rng, t, n), alpha, beta)


# Attention -----------------------------------------------------------------------------------------------------------


def cached(rng, batch, keys, kv_heads):
    """K and V as the cache holds them, some positions poisoned."""
    k, v = normal(rng, batch, keys, kv_heads, 64), normal(rng, batch, keys, kv_heads, 64, scale=3)
    bad = rng.random((batch, keys, kv_heads)) < 0.0005
    k[bad], v[bad] = np.array(0x7FFF, np.uint16).view(BF16), 0
    return k, v


@pytest.mark.parametrize(
    ("batch", "rows", "keys", "heads", "kv_heads", "window"),
    [
        (1, 1, 1, 1, 1, None), (2, 13, 13, 4, 2, None), (1, 200, 200, 8, 1, 48), (2, 33, 150, 16, 8, 5),
        (1, 150, 150, 3, 3, None), (1, 7, 4500, 16, 2, None), (1, 70, 2300, 8, 1, 2048), (1, 24, 131, 128, 16, None),
    ],
)  # fmt: skip
def test_attention(on_both, batch, rows, keys, heads, kv_heads, window):
    rng = np.random.default_rng(keys)
    q = normal(rng, batch, rows, heads, 64)
    k, v = cached(rng, batch, keys, kv_heads)
    last = np.arange(keys - rows, keys, dtype=np.int32)
    anywhere = rng.integers(-3, keys + 5, rows).astype(np.int32)
    for position in (last, anywhere):
        agree(on_both, ops.attention, q, k, v, position, scale=5.4730064863875 / 8, window=window)


def test_attention_of_large_scores(on_both):
    """p overflows, sums become infinite, and infinity over infinity NaN, as the contract has it."""
    rng = np.random.default_rng(0)
    q, k = normal(rng, 1, 40, 4, 64, scale=8), normal(rng, 1, 40, 4, 64)
    position = np.arange(40, dtype=np.int32)
    agree(on_both, ops.attention, q, k, normal(rng, 1, 40, 4, 64), position, scale=2.0)


# MoE -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("t", "h", "e", "k"), [(1, 128, 8, 1), (5, 384, 100, 7), (70, 256, 256, 8), (19, 8192, 256, 8), (129, 1024, 65, 64)]
)
def test_router(on_both, t, h, e, k):
    rng = np.random.default_rng(e)
    x, w = uneven(rng, t, h), (rng.normal(size=(e, h)) * 0.1).astype(F32)
    bias = rng.normal(size=e).astype(F32)
    static = dict(experts_per_token=k, multiplier=0.18, scaling=2.5)
    agree(on_both, ops.router, x, w, bias, **static)
    w[e // 2 :] = w[: e - e // 2]  # equal logits: ties
    bias[:] = 0
    bias[::5] = -0.0
    agree(on_both, ops.router, x, w, bias, **static)
    bias[1::3], bias[2::7] = np.nan, np.inf
    agree(on_both, ops.router, x, w, bias, **static)


@pytest.mark.parametrize(("t", "k"), [(1, 16), (7, 4096), (300, 144)])
def test_quantize(on_both, t, k):
    rng = np.random.default_rng(k)
    for scale in (1.0, 0.0078, 3e5):
        agree(on_both, ops.quantize, wild(rng, t, k), F32(scale))
    x = rng.integers(0, 1 << 16, (t, k), dtype=np.uint16).view(BF16)
    agree(on_both, ops.quantize, x, F32(0.01))


@pytest.mark.parametrize(("g", "n", "k"), [(1, 1, 16), (5, 33, 144), (3, 256, 4096)])
def test_quantize_weight(on_both, g, n, k):
    rng = np.random.default_rng(k)
    w = normal(rng, g, n, k, scale=0.02)
    w[-1] = normal(rng, n, k, scale=1e-38)  # subnormals
    w[0, :, :16] = 0
    agree(on_both, ops.quantize_weight, w)
    w[0] = 0
    agree(on_both, ops.quantize_weight, w)


def test_quantize_weight_that_is_not_finite(gpu):
    """The whole tensor is marked."""
    w = np.ones((2, 3, 32), BF16)
    w[1, 2, 3] = np.inf
    with jax.default_device(gpu):
        made, scale, scale_2 = (np.asarray(x) for x in ops.quantize_weight(jax.device_put(w, gpu)))
    assert np.isfinite(scale_2[0]) and scale_2[1].view(np.uint32) == 0x7FFFFFFF
    assert (scale.view(np.uint8)[1] == 0x7F).all() and not made[1].any() and made[0].any()


def expert_case(rng, t, k, model, intermediate, local, total):
    x = uneven(rng, t, model)
    experts = np.stack([rng.permutation(total)[:k] for _ in range(t)]).astype(np.int32)
    return x, experts, np.int32((total - local) // 2)


# tokens, slots, M, I, local experts, experts: all three tiles, hardly a token here, one expert for all.
EXPERTS = [
    (1, 1, 128, 128, 1, 1), (5, 2, 128, 256, 4, 8), (31, 4, 256, 128, 16, 16), (90, 2, 384, 128, 8, 8),
    (200, 3, 256, 640, 4, 8), (50, 2, 128, 128, 1, 200), (400, 1, 128, 384, 1, 1),
]  # fmt: skip


def nvfp4_weights(rng, local, model, intermediate):
    return (
        codes(rng, local, 2 * intermediate, model // 2), scales(rng, local, 2 * intermediate, model // 16),
        rng.uniform(1e-4, 2e-4, (local, 2)).astype(F32), codes(rng, local, model, intermediate // 2),
        scales(rng, local, model, intermediate // 16), rng.uniform(1e-4, 2e-4, local).astype(F32),
        rng.uniform(0.01, 0.1, 2).astype(F32),
    )  # fmt: skip


@pytest.mark.parametrize("case", [*EXPERTS, (24, 8, 4096, 4096, 2, 32)])
def test_expert_ffn(on_both, case):
    rng = np.random.default_rng(sum(case))
    _, _, model, intermediate, local, _ = case
    w13 = uneven(rng, local, 2 * intermediate, model) * BF16(0.1)
    w2 = normal(rng, local, model, intermediate, scale=0.1)
    agree(on_both, ops.expert_ffn, *expert_case(rng, *case), w13, w2)


@pytest.mark.parametrize("quantize_activations", [True, False])
@pytest.mark.parametrize("case", [*EXPERTS, (24, 8, 4096, 4096, 16, 256)])
def test_expert_ffn_nvfp4(on_both, case, quantize_activations):
    rng = np.random.default_rng(sum(case))
    _, _, model, intermediate, local, _ = case
    weights = nvfp4_weights(rng, local, model, intermediate)
    agree(on_both, ops.expert_ffn_nvfp4, *expert_case(rng, *case), *weights, quantize_activations=quantize_activations)


def test_expert_ffn_without_rows_here(on_both):
    rng = np.random.default_rng(1)
    x, _, _ = expert_case(rng, 9, 2, 128, 128, 2, 8)
    w13, w2 = normal(rng, 2, 256, 128), normal(rng, 2, 128, 128)
    agree(on_both, ops.expert_ffn, x, np.full((9, 2), 7, np.int32), np.int32(2), w13, w2)


@pytest.mark.parametrize(("t", "k", "m"), [(1, 1, 128), (30, 8, 4096), (11, 64, 384)])
def test_combine(on_both, t, k, m):
    rng = np.random.default_rng(m)
    experts = np.stack([rng.permutation(256)[:k] for _ in range(t)]).astype(np.int32)
    operands = uneven(rng, t, k, m), rng.random((t, k)).astype(F32), experts, normal(rng, m, scale=0.3)
    agree(on_both, ops.combine, *operands, eps=POST_EPS)


# Head ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("t", "v", "h"), [(1, 3, 128), (20, 1000, 8192), (33, 4001, 256)])
def test_head(on_both, t, v, h):
    rng = np.random.default_rng(v)
    agree(on_both, ops.head, uneven(rng, t, h), normal(rng, v, h), multiplier=0.177, cap=20.0)


@pytest.mark.parametrize(("t", "v"), [(1, 8), (5, 136), (9, 384), (3, 202048)])
def test_log_prob(on_both, t, v):
    rng = np.random.default_rng(v)
    logits = (20 * np.tanh(rng.normal(size=(t, v)))).astype(F32)
    logits[-1, -1] = np.nan
    tokens = rng.integers(0, v, t).astype(np.int32)
    agree(on_both, ops.log_prob, logits, tokens)
    agree(on_both, ops.log_prob, logits, np.where(tokens % 2, -1, v).astype(np.int32))
