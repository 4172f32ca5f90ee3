"""The contract on the device: every function, and the tensor core's fused sum, against the host's bits."""

import functools

import numpy as np
import pytest

from muse_jax.numerics_proof import corners, random_bits, spread
from muse_jax.ops.numerics import FUNCTIONS, numerics

COUNT = 1 << 20


def differing(on_both, function, *operands):
    device, host = on_both(functools.partial(numerics, function), *operands)
    bits = {1: np.uint8, 2: np.uint16, 4: np.uint32}[device.dtype.itemsize]
    return int((device.view(bits) != host.view(bits)).sum())


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


@pytest.mark.parametrize("kind", ["bf16", "fp16"])
def test_fsum16_corners(on_both, kind):
    acc, a, b = corners(kind)
    device, host = on_both(functools.partial(numerics, f"fsum16_{kind}"), acc, a, b)
    wrong = np.flatnonzero(device.view(np.uint32) != host.view(np.uint32))
    assert not len(wrong), [
        (hex(acc.view(np.uint32)[i]), a[i][:2], b[i][:2], hex(device.view(np.uint32)[i]), hex(host.view(np.uint32)[i]))
        for i in wrong[:8]
    ]
