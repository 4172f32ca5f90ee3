"""The contract on the device: every function, and the tensor core's fused sum, against the host's bits."""

import functools

import numpy as np
import pytest

from muse_jax.ops.numerics import FUNCTIONS, numerics

COUNT = 1 << 20


def differing(on_both, function, *operands):
    device, host = on_both(functools.partial(numerics, function), *operands)
    bits = {1: np.uint8, 2: np.uint16, 4: np.uint32}[device.dtype.itemsize]
    return int((device.view(bits) != host.view(bits)).sum())


def random_bits(rng, dtype, shape):
    bits = {np.float32: np.uint32}.get(dtype, dtype)
    return rng.integers(0, 1 << 8 * np.dtype(bits).itemsize, shape, dtype=bits).view(dtype)


@pytest.mark.parametrize("function", [f for f in FUNCTIONS if not f.startswith("fsum16")])
def test_elementary(on_both, function):
    rng = np.random.default_rng(FUNCTIONS.index(function))
    dtype = {"from_bf16": np.uint16, "from_fp16": np.uint16, "from_e4m3": np.uint8, "from_e2m1": np.uint8}.get(
        function, np.float32
    )
    operands = [random_bits(rng, dtype, COUNT) for _ in range(3 if function == "fma" else 1)]
    if function == "to_e4m3":
        operands = [np.abs(operands[0])]
    if function in ("exp", "sigmoid", "silu", "tanh"):  # random bits are mostly out of range: half in it
        operands[0][::2] = rng.normal(0, 30, COUNT // 2)
    assert differing(on_both, function, *operands) == 0


def spread(rng, kind, width, shape):
    """16-bit operands with exponents spread over `width` values around 1."""
    fraction, bias = {"bf16": (7, 127), "fp16": (10, 15)}[kind]
    exponent = bias + rng.integers(-(width // 2), width - width // 2, shape)
    exponent = np.clip(exponent, 0, 2 * bias)
    x = (rng.integers(0, 2, shape) << 15) | (exponent << fraction) | rng.integers(0, 1 << fraction, shape)
    return np.where(rng.random(shape) < 0.05, x & 0x8000, x).astype(np.uint16)


@pytest.mark.parametrize("kind", ["bf16", "fp16"])
@pytest.mark.parametrize("width", [1, 4, 12, 28, 60, 250])
def test_fsum16_random(on_both, kind, width):
    """12 times 2^20 random sums."""
    rng = np.random.default_rng(width)
    a, b = (spread(rng, kind, width, (COUNT, 16)) for _ in range(2))
    acc = (rng.normal(0, 1, COUNT) * 2.0 ** rng.integers(-width, width + 1, COUNT).clip(-140, 120)).astype(np.float32)
    assert differing(on_both, f"fsum16_{kind}", acc, a, b) == 0


@pytest.mark.parametrize("kind", ["bf16", "fp16"])
def test_fsum16_raw_bits(on_both, kind):
    """Any bits at all: subnormals, infinities, NaN."""
    rng = np.random.default_rng(7)
    a, b = (random_bits(rng, np.uint16, (COUNT, 16)) for _ in range(2))
    assert differing(on_both, f"fsum16_{kind}", random_bits(rng, np.float32, COUNT), a, b) == 0


def edges(kind):
    """Aimed at the rules' corners: signed zeros, sums that truncate to zero, the edge of overflow and of subnormals."""
    one = {"bf16": 0x3F80, "fp16": 0x3C00}[kind]
    tiny, minus = 0x0001, 0x8000
    largest = {"bf16": 0x7F7F, "fp16": 0x7BFF}[kind]
    rows = []
    for acc in (0x00000000, 0x80000000, 0x00000001, 0x80000001, 0x00800000, 0x80800000, 0x7F7FFFFF, 0xFF7FFFFF):
        for x in (0, minus, tiny, tiny | minus, one, one | minus, largest, largest | minus):
            for y in (0, minus, tiny, tiny | minus, one, largest):
                for count in (0, 1, 2, 16):
                    for fill in (0, minus):
                        a, b = np.full(16, fill, np.uint16), np.full(16, one, np.uint16)
                        a[:count], b[:count] = x, y
                        rows.append((acc, a, b))
    acc, a, b = zip(*rows, strict=True)
    return np.array(acc, np.uint32).view(np.float32), np.stack(a), np.stack(b)


@pytest.mark.parametrize("kind", ["bf16", "fp16"])
def test_fsum16_edges(on_both, kind):
    acc, a, b = edges(kind)
    device, host = on_both(functools.partial(numerics, f"fsum16_{kind}"), acc, a, b)
    wrong = np.flatnonzero(device.view(np.uint32) != host.view(np.uint32))
    assert not len(wrong), [
        (hex(acc.view(np.uint32)[i]), a[i][:2], b[i][:2], hex(device.view(np.uint32)[i]), hex(host.view(np.uint32)[i]))
        for i in wrong[:8]
    ]
