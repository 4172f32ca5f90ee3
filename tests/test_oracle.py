"""The oracle itself: against recorded H200 results, exact rational arithmetic, fp64, and its own definitions."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from oracle import attention, elementary, formats, fsum16, model, moe, quant, reduce
from oracle.tiny import CONFIG, random_bf16, tiny_weights

DATA = Path(__file__).parent / "data"
bfloat16 = ml_dtypes.bfloat16


def bits32(x) -> np.ndarray:
    return np.ascontiguousarray(x, np.float32).view(np.uint32)


def same(x, y) -> bool:
    """Equal bits."""
    return np.array_equal(np.ascontiguousarray(x).view(np.uint8), np.ascontiguousarray(y).view(np.uint8))


# Section 1 -----------------------------------------------------------------------------------------------------------


def test_bf16_rounding():
    rng = np.random.default_rng(1)
    x = rng.integers(0, 2**32, 200_000, dtype=np.uint64).astype(np.uint32).view(np.float32)
    with np.errstate(invalid="ignore"):
        expected = np.where(np.isnan(x), np.uint16(0x7FFF), x.astype(bfloat16).view(np.uint16))
    assert np.array_equal(formats.R(x).view(np.uint16), expected)
    assert formats.R(np.float32(3.4e38)).view(np.uint16) == 0x7F80


def test_e4m3_against_ml_dtypes():
    rng = np.random.default_rng(2)
    ties = np.arange(0, 448 * 1024, dtype=np.float32) / 1024  # every tie between neighbours, and much else
    x = np.concatenate([ties, ties * 2.0**-9, (448 * 2.0 ** rng.uniform(-25, 0, 50_000)).astype(np.float32)])
    assert np.array_equal(formats.e4m3_sat(x), x.astype(ml_dtypes.float8_e4m3fn).view(np.uint8))
    assert formats.e4m3_sat(np.array([448, 460, 1e30, np.inf, np.nan])).tolist() == [0x7E] * 4 + [0x7F]
    codes = np.arange(256, dtype=np.uint8)
    expected = codes.view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    assert np.array_equal(formats.e4m3_decode(codes), expected, equal_nan=True)


def test_e2m1_thresholds_and_packing():
    edges = np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0], np.float32)
    below, above = np.nextafter(edges, np.float32(0)), np.nextafter(edges, np.float32(9))
    assert formats.e2m1_rn_sat(edges).tolist() == [0, 2, 2, 4, 4, 6, 6]
    assert formats.e2m1_rn_sat(below).tolist() == [0, 1, 2, 3, 4, 5, 6]
    assert formats.e2m1_rn_sat(above).tolist() == [1, 2, 3, 4, 5, 6, 7]
    assert formats.e2m1_rn_sat(np.array([-0.0, -0.1, -7, np.inf, -np.inf])).tolist() == [0, 8, 15, 7, 15]
    codes = np.arange(16, dtype=np.uint8)
    values = formats.e2m1_decode(codes)
    assert values.tolist() == [0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6] and np.signbit(values[8])
    assert np.array_equal(formats.unpack_nibbles(formats.pack_nibbles(codes)), codes)
    assert formats.pack_nibbles(np.array([1, 2], np.uint8)).tolist() == [0x21]


# Sections 2 and 3 ----------------------------------------------------------------------------------------------------


def round_to_fp32(value: Fraction) -> np.float32:
    """Nearest even by integers alone (a zero comes out as +0)."""
    if value == 0:
        return np.float32(0)
    n, d = abs(value.numerator), value.denominator
    exponent = n.bit_length() - d.bit_length()
    exponent -= abs(value) < Fraction(2) ** exponent
    unit = Fraction(2) ** max(exponent - 23, -149)
    rounded = round(value / unit) * unit
    return np.float32(np.inf if rounded > 0 else -np.inf) if abs(rounded) >= 2**128 else np.float32(float(rounded))


def fma_cases() -> list[np.ndarray]:
    """Bits for a, b, c: anything; results near the subnormals; c near -a*b; c far below or above a*b."""
    rng = np.random.default_rng(3)

    def draw(low: int, high: int) -> np.ndarray:
        fraction = rng.integers(0, 2**23, 1500) & rng.choice([0x7FFFFF, 0x7FF000, 0x700000, 0x000007], 1500)
        return (rng.integers(0, 2, 1500) << 31 | rng.integers(low, high, 1500) << 23 | fraction).astype(np.uint32)

    triples = [(draw(0, 255), draw(0, 255), draw(0, 255))]
    triples += [(draw(40, 70), draw(40, 70), draw(0, 4)), (draw(0, 2), draw(100, 130), draw(0, 2))]
    triples += [(draw(120, 130), draw(120, 130), draw(90, 165)), (draw(180, 200), draw(180, 200), draw(230, 255))]
    a, b = draw(100, 150), draw(100, 150)
    product = a.view(np.float32) * b.view(np.float32)
    triples.append((a, b, bits32(-product) + rng.integers(0, 3, 1500).astype(np.uint32)))
    return [np.concatenate(x) for x in zip(*triples, strict=True)]


def test_fma_against_fractions():
    a, b, c = (x.view(np.float32) for x in fma_cases())
    got = elementary.fma(a, b, c)
    subnormal = 0
    for x, y, z, r in zip(a.tolist(), b.tolist(), c.tolist(), got, strict=True):
        expected = round_to_fp32(Fraction(x) * Fraction(y) + Fraction(z))
        assert expected == r, (x.hex(), y.hex(), z.hex())
        subnormal += 0 < abs(float(r)) < 2.0**-126
    assert subnormal > 500


def test_fma_special_values():
    inf, nan = np.inf, np.nan
    cases = [(inf, 0, 1, nan), (inf, 1, -inf, nan), (nan, 1, 1, nan), (inf, -2, 1, -inf), (1, 1, inf, inf)]
    cases += [(0.0, -1.0, -0.0, -0.0), (0.0, -1.0, 0.0, 0.0), (1.0, 1.0, -1.0, 0.0)]
    for a, b, c, expected in cases:
        assert bits32(elementary.fma(a, b, c)) == bits32(formats.canonical(np.float32(expected)))


def worst_ulp(got: np.ndarray, exact: np.ndarray) -> float:
    unit = np.ldexp(1.0, np.maximum(np.frexp(exact)[1] - 24, -149))
    return float(np.max(np.abs(got.astype(np.float64) - exact) / unit))


def test_elementary_functions_against_fp64():
    """Bounds in units of the last place. Eight million arguments gave exp 0.98, sigmoid 2.39, silu 2.33, tanh 1.31,
    log 1.96 and rsqrt 1.48."""
    rng = np.random.default_rng(4)
    x = np.concatenate([rng.uniform(-103, 88.7, 100_000), rng.uniform(-2, 2, 100_000)]).astype(np.float32)
    wide = x.astype(np.float64)
    assert worst_ulp(elementary.exp(x), np.exp(wide)) < 1.1
    x = np.clip(x, -80, 80)
    wide = x.astype(np.float64)
    assert worst_ulp(elementary.sigmoid(x), 1 / (1 + np.exp(-wide))) < 2.75
    assert worst_ulp(elementary.silu(x), wide / (1 + np.exp(-wide))) < 2.75
    assert worst_ulp(elementary.tanh(x / 8), np.tanh(wide / 8)) < 1.5
    positive = rng.integers(1, 0x7F800000, 100_000).astype(np.uint32).view(np.float32)
    near_one = rng.uniform(0.5, 2, 100_000).astype(np.float32)
    subnormal = rng.integers(1, 0x800000, 10_000).astype(np.uint32).view(np.float32)
    for z in (positive, near_one, subnormal):
        assert worst_ulp(elementary.log(z), np.log(z.astype(np.float64))) < 2.25
        assert worst_ulp(elementary.rsqrt(z), 1 / np.sqrt(z.astype(np.float64))) < 1.6


def test_elementary_special_values():
    def check(function, x, expected):
        assert bits32(function(np.float32(x))) == bits32(formats.canonical(np.float32(expected))), (function, x)

    inf, nan = np.inf, np.nan
    for function in (elementary.exp, elementary.sigmoid, elementary.silu, elementary.tanh, elementary.log):
        check(function, nan, nan)
    for x, y in ((-inf, 0), (-104.5, 0), (inf, inf), (89, inf), (0, 1), (-0.0, 1), (-104, 0), (-103, 2.0**-149)):
        check(elementary.exp, x, y)
    for x, y in ((0.0, 0.0), (-0.0, -0.0), (inf, 1), (-inf, -1), (50, 1)):
        check(elementary.tanh, x, y)
    for x, y in ((-1, nan), (-inf, nan), (0.0, -inf), (-0.0, -inf), (inf, inf), (1, 0)):
        check(elementary.log, x, y)


def test_lanes_of_any_length():
    x = np.arange(1, 41, dtype=np.float32)
    assert reduce.lanes(x[:37], x[:37]) == sum(i * i for i in range(1, 38))
    assert reduce.sumsq(np.ones((3, 256), np.float32)).tolist() == [256] * 3
    with pytest.raises(ValueError):
        reduce.sumsq(np.ones(192, np.float32))


# Sections 4 and 5 ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["bf16", "fp16"])
@pytest.mark.parametrize("name", ["hopper_mma", "hopper_mma_edges"])
def test_fsum16_is_what_the_h200_computed(name, kind):
    with np.load(DATA / f"{name}.npz") as dump:
        a, b, c, d = (dump[f"{kind}_{x}"] for x in "abcd")
    assert np.array_equal(fsum16.fsum16(c, a[:, :, None], b[:, None], kind), d)


def test_fsum16_rules_without_a_recording():
    one, minus_zero = np.full(16, 0x3F80, np.uint16), np.full(16, 0x8000, np.uint16)
    negative = np.uint32(0x80000000)
    assert fsum16.fsum16(negative, minus_zero, one) == 0  # seen on an H200 in tests/gpu/test_numerics.py
    assert fsum16.fsum16(np.uint32(0), minus_zero, one) == 0
    assert fsum16.fsum16(negative, minus_zero, -one.view(bfloat16)) == 0
    a = random_bf16(np.random.default_rng(5), 3, 1, 16)
    b = random_bf16(np.random.default_rng(6), 4, 16)
    acc = np.float32(7)
    assert fsum16.fsum16(acc, a, b).shape == (3, 4)
    assert same(fsum16.fsum16(acc, a, b), fsum16.fsum16(acc, a[..., ::-1], b[..., ::-1]))


def test_gemm_is_eight_chains(monkeypatch):
    rng = np.random.default_rng(7)
    x, w = random_bf16(rng, 5, 384), random_bf16(rng, 9, 384)
    parts = [fsum16.chain(x[:, None, s : s + 48], w[None, :, s : s + 48]) for s in range(0, 384, 48)]
    expected = ((parts[0] + parts[1]) + (parts[2] + parts[3])) + ((parts[4] + parts[5]) + (parts[6] + parts[7]))
    assert same(fsum16.gemm(x, w), expected)
    monkeypatch.setattr(fsum16, "_TILE", 16 * 8 * 4)
    assert same(fsum16.gemm(x, w), expected)
    x[2, 17] = np.nan
    poisoned = fsum16.gemm(x, w)
    assert (bits32(poisoned[2]) == 0x7FFFFFFF).all()
    assert same(np.delete(poisoned, 2, 0), np.delete(expected, 2, 0))


def test_quantised_gemms_against_fp64():
    rng = np.random.default_rng(8)
    x, w = random_bf16(rng, 3, 256), random_bf16(rng, 5, 256)
    packed, sf, ws2 = quant.quantise_weights(w)
    real_w = quant.dequantise(packed, sf).astype(np.float64) * float(ws2)
    assert np.abs(real_w - w.astype(np.float64)).max() < 0.6
    exact = x.astype(np.float64) @ real_w.T
    assert np.allclose(quant.gemm_w4a16(x, packed, sf, ws2), exact, rtol=1e-5, atol=1e-4)
    scale = np.float32(0.003)
    xp, xs = quant.quantise_activations(x, scale)
    exact = quant.dequantise(xp, xs).astype(np.float64) * float(scale) @ real_w.T
    assert np.allclose(quant.gemm_w4a4(xp, xs, scale, packed, sf, ws2), exact, rtol=1e-5, atol=1e-4)
    x[1, 40] = np.inf
    xp, xs = quant.quantise_activations(x, scale)
    assert xs[1, 2] == 0x7F and not xp[1, 16:24].any()
    assert np.isnan(quant.gemm_w4a4(xp, xs, scale, packed, sf, ws2)).any(axis=1).tolist() == [False, True, False]


def test_golden_nvfp4_row():
    """A published row whose scale is amax / 2688: both quantisers give its bytes, but for the scale of a zero block."""
    i = np.arange(16, dtype=np.float32)
    row = np.concatenate([(i - 7.5) / 3, (i - 7.5) / 30, 0 * i]).astype(np.float32).astype(bfloat16)
    scale = np.float32(np.abs(row.astype(np.float32)).max()) / np.float32(2688)
    assert scale == np.float32(0.0009300595265813172)
    codes = bytes.fromhex("FFEECD9A21546677" * 2) + bytes(8)
    packed, sf = quant.quantise_activations(row, scale)
    assert packed.tobytes() == codes and sf.tobytes() == bytes.fromhex("7E6300")
    packed, sf, ws2 = quant.quantise_weights(row)
    assert packed.tobytes() == codes and sf.tobytes() == bytes.fromhex("7E6338") and ws2 == scale
    packed, sf, ws2 = quant.quantise_weights(np.zeros((2, 16), bfloat16))
    assert not packed.any() and (sf == 0x38).all() and ws2 == 1


# Section 7 -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("window", [200, None])
def test_attention_chunks_follow_absolute_positions(monkeypatch, window):
    monkeypatch.setattr(attention, "SUPER_CHUNK", 256)  # 2048 would take long
    rng = np.random.default_rng(9)
    length, query = 500, 490
    q, k, v = (random_bf16(rng, length, 1, 64) for _ in range(3))
    got = attention.attend(q, k, v, 1.0, window)[query, 0]
    p, values = np.zeros(512, bfloat16), np.zeros((65, 512), bfloat16)
    first = 0 if window is None else query - window + 1
    score = fsum16.chain(q[query], k[first : query + 1, 0])
    p[first : query + 1] = formats.R(elementary.exp(score * np.float32(1 / 8)))
    values[:64, :length], values[64] = v[:, 0].T, 1
    sums = [fsum16.chain(p[c : c + 128], values[:, c : c + 128]) for c in (0, 128, 256, 384)]
    total = (sums[0] + sums[1]) + (sums[2] + sums[3])
    assert same(got, formats.R(total[:64] / total[64]))


def test_router_ties_and_nans():
    h = np.zeros((2, 128), bfloat16)
    h[1] = np.nan
    bias = np.array([0, 0.5, np.nan, 0.5, -np.inf, 0], np.float32)
    chosen, c = moe.choose(h, np.ones((6, 128), np.float32), bias, 6, 1.0, 2.0)
    assert chosen.tolist() == [[1, 3, 0, 5, 4, 2], [0, 1, 2, 3, 4, 5]]
    assert np.allclose(c[0], 1 / 3) and (bits32(c[1]) == 0x7FFFFFFF).all()


def test_argmax_and_log_prob():
    rng = np.random.default_rng(10)
    logits = rng.normal(0, 5, (3, 8 * 25)).astype(np.float32)
    exact = logits[:, 7] - np.log(np.exp(logits.astype(np.float64)).sum(axis=1))
    assert np.allclose(model.log_prob(logits, np.array([7, 7, 7])), exact, atol=2e-6)
    rows = np.array([[1, np.nan, 3, 3], [np.nan] * 4, [-np.inf, np.nan, -np.inf, np.nan]], np.float32)
    assert model.argmax(rows).tolist() == [2, 0, 0]


POISON = 5  # a token id used once


def test_forward_is_finite_causal_and_contains_nans():
    rng = np.random.default_rng(11)
    w, tokens = tiny_weights(rng), np.array([1, 2, 3, POISON, 4, 6, 7, 8, 9, 10])
    taps = model.forward(CONFIG, w, tokens)
    assert all(np.isfinite(x.astype(np.float64)).all() for x in taps.values())
    assert taps["logits"].shape == (10, 64) and taps["layers.1.k"].shape == (10, 2, 64)
    assert taps["layers.0.router_experts"].dtype == np.int32 and taps["layers.0.v"].dtype == bfloat16
    short = model.forward(CONFIG, w, tokens[:6])
    assert all(same(x[:6], short[name]) for name, x in taps.items())
    other = model.forward(CONFIG | {"activation_format": "bf16"}, w, tokens)
    assert same(other["layers.0.post_feedforward_residual"], taps["layers.0.post_feedforward_residual"])
    assert not same(other["logits"], taps["logits"]) and np.allclose(other["logits"], taps["logits"], atol=1)

    w["embed_tokens.weight"][POISON, 3] = np.nan
    poisoned = model.forward(CONFIG, w, tokens)
    for name, x in taps.items():
        assert same(poisoned[name][:3], x[:3]), name
    seen = np.isnan(poisoned["layers.0.post_feedforward_residual"]).all(axis=1)
    assert seen.tolist() == [False] * 3 + [True] * 4 + [False] * 3  # the window of the sliding layer
    for name in ("layers.0.post_attention_residual", "layers.0.post_feedforward_residual", "layers.1.k"):
        assert same(poisoned[name][7:], taps[name][7:]), name
    assert (poisoned["layers.0.k"][3].view(np.uint16) == 0x7FFF).all() and not poisoned["layers.0.v"][3].any()
    assert (bits32(poisoned["logits"][3:]) == 0x7FFFFFFF).all()  # the full layer sees it from everywhere after
