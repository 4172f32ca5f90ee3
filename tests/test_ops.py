"""Every op against the NumPy oracle, bit for bit."""

from __future__ import annotations

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from op_helpers import BF16, normal, random_floats, same, wild
from oracle import attention, elementary, formats, fsum16, model, moe, norms, quant

from muse_jax import ops
from muse_jax.numerics_proof import corners

E4M3 = ml_dtypes.float8_e4m3fn
EPS, POST_EPS = 1e-5, 1e-8
MILLION = 1_000_000

seeds = st.integers(0, 2**32 - 1)
rows = st.integers(1, 9)
some = settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True)


# --- Elementary functions and formats ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["exp", "sigmoid", "silu", "tanh", "log", "rsqrt"])
def test_elementary_functions(name: str) -> None:
    x = random_floats(1, MILLION)
    same(ops.numerics(name, jnp.asarray(x)), getattr(elementary, name)(x))


@np.errstate(all="ignore")
def test_fma() -> None:
    a, b, c = (random_floats(seed, MILLION) for seed in (2, 3, 4))
    c[::2] = -(a[::2] * b[::2])  # cancellation
    a[1::4], b[1::4] = np.abs(a[1::4]) * np.float32(1e-30), np.float32(1e-12)  # subnormal results
    same(ops.numerics("fma", *map(jnp.asarray, (a, b, c))), elementary.fma(a, b, c))


def test_to_bf16() -> None:
    x = random_floats(5, MILLION)
    same(ops.numerics("to_bf16", jnp.asarray(x)), formats.R(x).view(np.uint16))


def test_every_16_bit_pattern_widens_exactly() -> None:
    bits = np.arange(65536, dtype=np.uint16)
    same(ops.numerics("from_bf16", jnp.asarray(bits)), formats.canonical(bits.view(BF16).astype(np.float32)))
    same(ops.numerics("from_fp16", jnp.asarray(bits)), formats.canonical(bits.view(np.float16).astype(np.float32)))


def test_e4m3_and_e2m1() -> None:
    codes = np.arange(256, dtype=np.uint8)
    same(ops.numerics("from_e4m3", jnp.asarray(codes)), formats.e4m3_decode(codes))
    same(ops.numerics("from_e2m1", jnp.asarray(codes[:16])), formats.e2m1_decode(codes[:16]))
    x = random_floats(6, MILLION)
    same(ops.numerics("to_e2m1", jnp.asarray(x)), formats.e2m1_rn_sat(x))
    halfway = (formats.e4m3_decode(codes[:126]) + formats.e4m3_decode(codes[1:127])) / np.float32(2)
    x = np.concatenate(
        [np.abs(x), halfway, np.nextafter(halfway, np.float32(0)), np.nextafter(halfway, np.float32(999))]
    )
    same(ops.numerics("to_e4m3", jnp.asarray(x)), formats.e4m3_sat(x))


@pytest.mark.parametrize("kind", ["bf16", "fp16"])
def test_fsum16(kind: str) -> None:
    rng, n = np.random.default_rng(7), 60_000
    a, b = (rng.integers(0, 2**16, (n, 16), dtype=np.uint16) for _ in range(2))
    acc = random_floats(8, n)
    fraction = {"bf16": 7, "fp16": 10}[kind]
    near = slice(0, n // 2)  # exponents close together, so that every rule decides something
    for x in (a, b):
        field = rng.integers(0, 8, (n // 2, 16)) + {"bf16": 120, "fp16": 0}[kind]
        x[near] = (x[near] & (0x8000 | ((1 << fraction) - 1))) | (field << fraction).astype(np.uint16)
    acc[near] = (rng.normal(size=n // 2) * 2.0 ** rng.uniform(-20, 10, n // 2)).astype(np.float32)
    acc[: n // 8], a[: n // 8] = np.float32(-0.0), a[: n // 8] & 0x8000
    same(ops.numerics(f"fsum16_{kind}", *map(jnp.asarray, (acc, a, b))), fsum16.fsum16(acc, a, b, kind))


@pytest.mark.parametrize("kind", ["bf16", "fp16"])
def test_fsum16_of_cancelling_products(kind: str) -> None:
    """The two largest products, of any size, add up to zero."""
    rng, n = np.random.default_rng(9), 20_000
    finite = np.uint16(0xFFFF & ~(1 << {"bf16": 7, "fp16": 10}[kind]))  # no exponent of all ones
    a, b = (rng.integers(0, 2**16, (n, 16), dtype=np.uint16) & finite for _ in range(2))
    a[:, 0] |= 0x4000  # 2 or more, the others less
    a[:, 2:] &= 0xBFFF
    b[:, 2:] &= 0xBFFF
    a[:, 1], b[:, 1] = a[:, 0] ^ 0x8000, b[:, 0]
    acc = np.where(rng.random(n) < 0.5, 0, rng.normal(size=n)).astype(np.float32)
    for operands in ((acc, a, b), corners(kind)):
        same(ops.numerics(f"fsum16_{kind}", *map(jnp.asarray, operands)), fsum16.fsum16(*operands, kind))


# --- GEMM -------------------------------------------------------------------------------------------------------------


@some
@given(seeds, rows, st.integers(1, 40), st.integers(1, 3), st.sampled_from(["plain", "wild", "spread"]))
def test_gemm(seed: int, t: int, n: int, inner: int, kind: str) -> None:
    rng, k = np.random.default_rng(seed), 128 * inner
    if kind == "spread":  # exponents from block to block, so that a chain enters and leaves the fast form
        scale = 2.0 ** rng.integers(-70, 60, (1, k // 16)).repeat(16, axis=1)
        x, w = ((rng.normal(size=(m, k)) * scale).astype(BF16) for m in (t, n))
    else:
        x, w = ((wild if kind == "wild" else normal)(rng, m, k) for m in (t, n))
    expected = fsum16.gemm(x, w)
    same(ops.gemm(jnp.asarray(x), jnp.asarray(w), out_dtype=jnp.float32), expected)
    same(ops.gemm(jnp.asarray(x), jnp.asarray(w)), formats.R(expected))


@some
@given(seeds, rows, st.integers(1, 40), st.integers(1, 2))
def test_quantised_gemms(seed: int, t: int, n: int, inner: int) -> None:
    rng, k = np.random.default_rng(seed), 128 * inner
    x, w = wild(rng, t, k), normal(rng, n, k)
    codes, scales, ws2 = quant.quantise_weights(w)
    x_codes, x_scales = quant.quantise_activations(x, 0.02)
    weights = (jnp.asarray(codes), jnp.asarray(scales.view(E4M3)))
    same(ops.gemm_w4a16(jnp.asarray(x), *weights, ws2, out_dtype=jnp.float32), quant.gemm_w4a16(x, codes, scales, ws2))
    rows_ = (jnp.asarray(x_codes), jnp.asarray(x_scales.view(E4M3)))
    expected = quant.gemm_w4a4(x_codes, x_scales, 0.02, codes, scales, ws2)
    same(ops.gemm_w4a4(*rows_, *weights, ws2, 0.02, out_dtype=jnp.float32), expected)
    same(ops.gemm_w4a4(*rows_, *weights, ws2, 0.02), formats.R(expected))


@some
@given(seeds, rows, st.integers(1, 20), st.integers(-20, 10))
def test_quantisers(seed: int, t: int, blocks: int, exponent: int) -> None:
    rng = np.random.default_rng(seed)
    scale = np.float32(rng.uniform(1, 2) * 2.0**exponent)
    x = wild(rng, t, 16 * blocks)
    x[0, :16] = 0
    codes, scales = ops.quantize(jnp.asarray(x), scale)
    expected = quant.quantise_activations(x, scale)
    same(codes, expected[0])
    same(np.asarray(scales).view(np.uint8), expected[1])
    w = normal(rng, 3, t, 16 * blocks, scale=10.0 ** rng.uniform(-30, 30))
    w[1] = 0
    w[2, 0, :16] = 0
    codes, scales, ws2 = ops.quantize_weight(jnp.asarray(w))
    for g in range(3):
        expected = quant.quantise_weights(w[g])
        same(codes[g], expected[0])
        same(np.asarray(scales[g]).view(np.uint8), expected[1])
        same(ws2[g], expected[2])


# --- Norms, RoPE, attention -------------------------------------------------------------------------------------------


@some
@given(seeds, rows, st.integers(1, 4))
def test_rms_norm(seed: int, t: int, inner: int) -> None:
    rng, n = np.random.default_rng(seed), 128 * inner
    x, w = wild(rng, t, n), normal(rng, n, scale=0.1)
    stream = (x.astype(np.float32) * rng.normal(size=(t, n))).astype(np.float32)
    g = norms.gain(w)
    j = jnp.asarray
    same(ops.rms_norm(j(stream), j(w), eps=EPS), norms.gained_norm(stream, g, EPS))
    same(ops.rms_norm(j(x), j(w), eps=EPS), norms.gained_norm(x, g, EPS))
    same(ops.rms_norm(j(x), eps=POST_EPS), norms.plain_norm(x, POST_EPS))
    same(ops.rms_norm(j(x), j(w), eps=POST_EPS, scale_first=True), norms.scale_first_norm(x, g, POST_EPS))
    final = norms.gained_norm(formats.R(stream), formats.widen(w), EPS)
    same(ops.rms_norm(j(stream), j(w), eps=EPS, centred=False, round_input=True), final)


def test_rope_table() -> None:
    positions = np.r_[0:40, 131_000:131_072, 1_048_000 : 2**20]
    for theta in (1e4, 5e5, 8e6):
        table = ops.rope_table(2**20, theta)[positions]
        same(table, np.concatenate(attention.rope_table(positions, theta), axis=1))


@some
@given(seeds, rows, st.integers(1, 4), st.booleans())
def test_norm_and_rope(seed: int, t: int, heads: int, rotate: bool) -> None:
    rng = np.random.default_rng(seed)
    q, k, v = (wild(rng, t, heads, 64) for _ in range(3))
    positions = rng.integers(0, 2**17, t)
    cos, sin = attention.rope_table(positions, 5e5)
    table = jnp.asarray(np.concatenate([cos, sin], axis=1)) if rotate else None

    def expected(x: np.ndarray) -> np.ndarray:
        y = formats.R(norms.head_norm(x, EPS))
        return attention.rotate(y, cos, sin) if rotate else y

    same(ops.q_norm_rope(jnp.asarray(q), table, eps=EPS), expected(q))
    actual = ops.kv_norm_rope(jnp.asarray(k), jnp.asarray(v), table, eps=EPS)
    for a, e in zip(actual, attention.cached(expected(k), v), strict=True):
        same(a, e)


def sequence(rng: np.random.Generator, length: int, heads: int, kv_heads: int) -> list[np.ndarray]:
    shapes = ((length, heads, 64), (length, kv_heads, 64), (length, kv_heads, 64))
    q, k, v = (normal(rng, *s) for s in shapes)
    q, k = (formats.R(norms.head_norm(x, EPS)) for x in (q, k))
    return [q, *attention.cached(k, v)]


@settings(some, max_examples=10)
@given(seeds, st.integers(1, 70), st.sampled_from([(1, 1), (4, 2), (3, 1)]), st.sampled_from([None, 1, 7, 32]))
def test_attention(seed: int, length: int, heads: tuple[int, int], window: int | None) -> None:
    rng = np.random.default_rng(seed)
    q, k, v = sequence(rng, length, *heads)
    v[rng.random(v.shape) < 0.01] *= BF16(1e-30)  # blocks that leave the fast form
    if length > 3:
        k[length // 2, 0], v[length // 2, 0] = formats.NAN16.view(BF16), 0  # a poisoned position
    expected = attention.attend(q, k, v, 43.8 / 8, window)
    position = jnp.arange(length, dtype=jnp.int32)
    j = [jnp.asarray(x) for x in (q, k, v)]
    same(ops.attention(*j, position, scale=43.8 / 64, window=window), expected)
    # Any rows, in any order, against more keys than they see.
    some_rows = rng.permutation(length)[: 1 + length // 2]
    chosen = ops.attention(j[0][some_rows], *j[1:], position[some_rows], scale=43.8 / 64, window=window)
    same(chosen, expected[some_rows])


@pytest.mark.parametrize("window", [None, 512])
def test_attention_beyond_one_superchunk(window: int | None) -> None:
    rng, length = np.random.default_rng(11), 2300
    q, k, v = sequence(rng, length, 1, 1)
    last = np.array([2047, 2048, 2175, length - 1], np.int32)
    actual = ops.attention(*map(jnp.asarray, (q[last], k, v)), jnp.asarray(last), scale=0.7, window=window)
    for row, position in enumerate(last):
        same(actual[row : row + 1], attend_one(q[position], k, v, int(position), np.float32(0.7), window))


def attend_one(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, position: int, scale: np.float32, window: int | None
) -> np.ndarray:
    """Contract 7, Attention 5 to 7, for one query [1, 64] (the oracle's attend computes all rows at once)."""
    end = -(-(position + 1) // 128) * 128
    score = np.zeros(end, np.float32)
    score[: position + 1] = fsum16.chain(q, k[: position + 1, 0])
    seen = np.arange(end) <= position
    if window:
        seen &= position - np.arange(end) < window
    p = np.where(seen, formats.R(elementary.exp(score * scale)), BF16(0))
    operand = np.zeros((65, end), BF16)
    operand[:64, : position + 1], operand[64] = v[: position + 1, 0].T, 1
    total = np.zeros(65, np.float32)
    for start in range(0, end, 2048):
        part = np.zeros(65, np.float32)
        for c in range(start, min(start + 2048, end), 128):
            part = part + fsum16.chain(p[None, c : c + 128], operand[:, c : c + 128])
        total = total + part
    return formats.R(total[:64] / total[64])[None, None]


def test_attention_batches_and_empty_rows() -> None:
    rng = np.random.default_rng(12)
    sequences = [sequence(rng, 20, 4, 2) for _ in range(3)]
    q, k, v = (jnp.asarray(np.stack(x)) for x in zip(*sequences, strict=True))
    position = jnp.arange(20, dtype=jnp.int32)
    together = ops.attention(q, k, v, position, scale=0.5)
    for b in range(3):
        same(together[b], ops.attention(q[b], k[b], v[b], position, scale=0.5))
    nothing = ops.attention(q[0, :1], k[0], v[0], jnp.array([-1], jnp.int32), scale=0.5)
    same(nothing, np.full((1, 4, 64), formats.NAN16.view(BF16)))


@some
@given(seeds, rows, st.integers(1, 4))
def test_attention_gate(seed: int, t: int, heads: int) -> None:
    rng = np.random.default_rng(seed)
    a, u = wild(rng, t, heads, 64), wild(rng, t, heads * 64)
    expected = formats.R(norms.head_norm(a, EPS).reshape(t, -1) * elementary.sigmoid(formats.widen(u)))
    same(ops.attention_gate(jnp.asarray(a), jnp.asarray(u), eps=EPS), expected)


# --- Residual gate, MoE, head -----------------------------------------------------------------------------------------


@some
@given(seeds, rows, st.integers(1, 300))
def test_residual_gate(seed: int, t: int, hidden: int) -> None:
    rng = np.random.default_rng(seed)
    s, n, gate = (
        random_floats(seed, t * hidden + 200)[: t * hidden].reshape(t, hidden),
        wild(rng, t, hidden),
        wild(rng, hidden),
    )
    gate[: hidden // 3] *= BF16(8)
    alpha, beta = ops.gate_coefficients(jnp.asarray(gate), temperature=0.7)
    same(ops.residual(jnp.asarray(s), jnp.asarray(n), alpha, beta), norms.residual_gate(s, n, gate, 0.7))


@some
@given(seeds, rows, st.sampled_from([(5, 5), (16, 1), (40, 8), (33, 4)]), st.sampled_from(["plain", "ties", "nan"]))
def test_router(seed: int, t: int, sizes: tuple[int, int], kind: str) -> None:
    rng, (experts, slots) = np.random.default_rng(seed), sizes
    h = normal(rng, t, 256)
    w, bias = rng.normal(size=(experts, 256)).astype(np.float32), rng.normal(size=experts).astype(np.float32)
    if kind == "ties":
        w[:] = w[rng.integers(0, 3, experts)]
        bias[:] = 0
    if kind == "nan":
        bias[rng.integers(0, experts, experts // 2)] = np.nan
        h[0, 3] = np.nan
    chosen, weights, logits = ops.router(
        *map(jnp.asarray, (h, w, bias)), experts_per_token=slots, multiplier=0.2, scaling=2.5
    )
    expected = moe.choose(h, w, bias, slots, 0.2, 2.5)
    same(chosen, expected[0])
    same(weights, expected[1])
    dots = moe.tree8(moe.lanes(moe.segments(h.astype(np.float32))[:, :, None], moe.segments(w)[:, None]))
    same(logits, formats.canonical(dots * np.float32(0.2)))


def choices(rng: np.random.Generator, t: int, experts: int, slots: int) -> np.ndarray:
    return np.argsort(rng.random((t, experts)), axis=1)[:, :slots].astype(np.int32)


def expert_by_expert(x: np.ndarray, chosen: np.ndarray, expert: moe.Expert, local: range) -> np.ndarray:
    f = np.zeros((*chosen.shape, x.shape[1]), BF16)
    for i in local:
        t, slot = np.nonzero(chosen == i)
        if len(t):
            f[t, slot] = expert(x[t], i)
    return f


@settings(some, max_examples=8)
@given(seeds, st.integers(1, 12), st.sampled_from([(6, 3), (4, 4), (9, 2)]))
def test_expert_ffn(seed: int, t: int, sizes: tuple[int, int]) -> None:
    rng, experts, m, i = np.random.default_rng(seed), sizes[0], 128, 256
    x, chosen = wild(rng, t, m), choices(rng, t, *sizes)
    weights = {
        "gate_up_proj": normal(rng, experts, 2 * i, m, scale=0.1),
        "down_proj": normal(rng, experts, m, i, scale=0.1),
    }
    first, end = sorted(rng.integers(0, experts + 1, 2))
    local = slice(first, end)
    arrays = [jnp.asarray(weights[name][local]) for name in ("gate_up_proj", "down_proj")]
    actual = ops.expert_ffn(jnp.asarray(x), jnp.asarray(chosen), first, *arrays)
    same(actual, expert_by_expert(x, chosen, moe.bf16_expert(weights), range(first, end)))


@settings(some, max_examples=8)
@given(seeds, st.integers(1, 12), st.booleans())
def test_expert_ffn_nvfp4(seed: int, t: int, quantize_activations: bool) -> None:
    rng, experts, slots, m, i = np.random.default_rng(seed), 6, 3, 256, 128
    x, chosen = wild(rng, t, m), choices(rng, t, experts, slots)
    masters = [normal(rng, experts, 2 * i, m, scale=0.1), normal(rng, experts, m, i, scale=0.1)]
    masters[0][:, :i] *= BF16(3)  # gate and up halves have scales of their own
    first, end = 1, 5
    input_scales = np.array([0.01, 0.003], np.float32)
    w13, s13, ws13 = (np.asarray(a) for a in ops.quantize_weight(jnp.asarray(masters[0].reshape(experts, 2, i, m))))
    w2, s2, ws2 = (np.asarray(a) for a in ops.quantize_weight(jnp.asarray(masters[1])))
    weights = {
        "gate_up_proj": w13.reshape(experts, 2 * i, -1),
        "gate_up_proj_weight_scale": s13.reshape(experts, 2 * i, -1),
        "gate_up_proj_weight_scale_2": ws13,
        "gate_up_proj_input_scale": input_scales[:1],
        "down_proj": w2,
        "down_proj_weight_scale": s2,
        "down_proj_weight_scale_2": ws2,
        "down_proj_input_scale": input_scales[1:],
    }
    expert = moe.nvfp4_expert(weights, "nvfp4" if quantize_activations else "bf16")
    expected = expert_by_expert(x, chosen, expert, range(first, end))
    names = [f"{p}{s}" for p in ("gate_up_proj", "down_proj") for s in ("", "_weight_scale", "_weight_scale_2")]
    arrays = [jnp.asarray(weights[name][first:end]) for name in names]
    common = (jnp.asarray(x), jnp.asarray(chosen), first)
    scales = jnp.asarray(input_scales)
    same(ops.expert_ffn_nvfp4(*common, *arrays, scales, quantize_activations=quantize_activations), expected)
    both = [jnp.asarray(w[first:end]) for w in masters]
    same(ops.expert_ffn_masters(*common, *both, scales, quantize_activations=quantize_activations), expected)


def test_expert_ffn_with_more_pairs_than_one_batch() -> None:
    rng, t = np.random.default_rng(13), 2200
    x, chosen = normal(rng, t, 128), choices(rng, t, 3, 2)
    w13, w2 = normal(rng, 3, 256, 128, scale=0.1), normal(rng, 3, 128, 128, scale=0.1)
    arrays = [jnp.asarray(a) for a in (w13, w2)]
    whole = np.asarray(ops.expert_ffn(jnp.asarray(x), jnp.asarray(chosen), 0, *arrays))
    for part in (slice(0, 900), slice(900, t)):
        same(ops.expert_ffn(jnp.asarray(x[part]), jnp.asarray(chosen[part]), 0, *arrays), whole[part])


@some
@given(seeds, rows, st.integers(1, 8), st.integers(1, 3))
def test_combine(seed: int, t: int, slots: int, inner: int) -> None:
    rng, m = np.random.default_rng(seed), 128 * inner
    f, chosen, w = wild(rng, t, slots, m), choices(rng, t, 12, slots), normal(rng, m, scale=0.1)
    c = rng.random((t, slots)).astype(np.float32)
    e = np.zeros((t, m), BF16)
    e[:, 0] = np.arange(t)  # tells the oracle's expert which rows it is given

    def expert(given_rows: np.ndarray, i: int) -> np.ndarray:
        row = given_rows[:, 0].astype(int)
        return f[row, np.argmax(chosen[row] == i, axis=1)]

    expected = moe.combine(e, chosen, c, expert, norms.gain(w), POST_EPS)
    same(ops.combine(*map(jnp.asarray, (f, c, chosen, w)), eps=POST_EPS), expected)


@some
@given(seeds, rows, st.integers(1, 10))
def test_head_and_log_prob(seed: int, t: int, groups: int) -> None:
    rng, vocabulary = np.random.default_rng(seed), 8 * groups + 8 * (seed % 3)
    weights = {"norm.weight": normal(rng, 128), "lm_head.weight": normal(rng, vocabulary, 128)}
    config = {"rms_norm_eps": EPS, "output_multiplier": 0.1, "final_logit_softcapping": 30.0}
    s = formats.widen(wild(rng, t, 128))
    expected = model.head(config, weights, s)
    h = ops.rms_norm(jnp.asarray(s), jnp.asarray(weights["norm.weight"]), eps=EPS, centred=False, round_input=True)
    logits = ops.head(h, jnp.asarray(weights["lm_head.weight"]), multiplier=0.1, cap=30.0)
    same(logits, expected)
    token = rng.integers(0, vocabulary, t).astype(np.int32)
    same(ops.log_prob(logits, jnp.asarray(token)), model.log_prob(expected, token))
    outside = ops.log_prob(logits, jnp.full(t, vocabulary, jnp.int32))
    same(outside, np.full(t, formats.NAN32.view(np.float32)))


# --- Rows do not meet -------------------------------------------------------------------------------------------------


def row_ops() -> dict:
    rng = np.random.default_rng(14)
    w = jnp.asarray(normal(rng, 48, 128))
    codes, scales, ws2 = ops.quantize_weight(w)
    w13, w2 = jnp.asarray(normal(rng, 4, 256, 128)), jnp.asarray(normal(rng, 4, 128, 128))
    chosen = jnp.asarray(choices(rng, 6, 4, 2))
    gain, router_w = jnp.asarray(normal(rng, 128)), jnp.asarray(rng.normal(size=(8, 128)).astype(np.float32))
    scale = jnp.ones(2, jnp.float32)
    alpha = jnp.full(128, 0.5, jnp.float32)
    return {
        "gemm": lambda x: ops.gemm(x, w),
        "gemm_w4a16": lambda x: ops.gemm_w4a16(x, codes, scales, ws2),
        "gemm_w4a4": lambda x: ops.gemm_w4a4(*ops.quantize(x, 0.1), codes, scales, ws2, 0.1),
        "rms_norm": lambda x: ops.rms_norm(x, gain, eps=EPS),
        "scale_first": lambda x: ops.rms_norm(x, gain, eps=EPS, scale_first=True),
        "q_norm_rope": lambda x: ops.q_norm_rope(x.reshape(-1, 2, 64), eps=EPS),
        "kv_norm_rope": lambda x: ops.kv_norm_rope(x.reshape(-1, 2, 64), x.reshape(-1, 2, 64), eps=EPS)[0],
        "attention_gate": lambda x: ops.attention_gate(x.reshape(-1, 2, 64), x, eps=EPS),
        "residual": lambda x: ops.residual(x.astype(jnp.float32), x, alpha, alpha),
        "router": lambda x: ops.router(x, router_w, router_w[:, 0], experts_per_token=2, multiplier=1.0, scaling=1.0)[
            2
        ],
        "expert_ffn": lambda x: ops.expert_ffn(x, chosen, 0, w13, w2),
        "expert_ffn_masters": lambda x: ops.expert_ffn_masters(x, chosen, 0, w13, w2, scale, quantize_activations=True),
        "combine": lambda x: ops.combine(
            jnp.stack([x, x], axis=1), jnp.ones((6, 2), jnp.float32), chosen, gain, eps=POST_EPS
        ),
        "head": lambda x: ops.head(x, w, multiplier=1.0, cap=30.0),
    }


@pytest.mark.parametrize("name", list(row_ops()))
def test_a_nan_row_stays_alone(name: str) -> None:
    op = row_ops()[name]
    x = normal(np.random.default_rng(15), 6, 128)
    clean = np.asarray(op(jnp.asarray(x)))
    x[2, 7], x[4, 99] = np.nan, np.inf
    dirty = np.asarray(op(jnp.asarray(x)))
    keep = [0, 1, 3, 5]
    same(dirty[keep], clean[keep])
    assert np.isnan(dirty[2].astype(np.float32)).any()
    if name not in (
        "residual",
        "router",
        "q_norm_rope",
        "kv_norm_rope",
        "attention_gate",
    ):  # these work per element or head
        assert np.isnan(dirty[2].astype(np.float32)).all()


def test_a_nan_query_stays_alone() -> None:
    q, k, v = sequence(np.random.default_rng(16), 40, 4, 2)
    position = jnp.arange(40, dtype=jnp.int32)
    clean = np.asarray(ops.attention(*map(jnp.asarray, (q, k, v)), position, scale=0.5))
    q[7] = formats.NAN16.view(BF16)
    dirty = np.asarray(ops.attention(*map(jnp.asarray, (q, k, v)), position, scale=0.5))
    keep = np.arange(40) != 7
    same(dirty[keep], clean[keep])
    same(dirty[7], np.full((4, 64), formats.NAN16.view(BF16)))
