"""A short form of the numerics proof: what a device computes against recorded results or the CPU's, byte for byte.

`recorded.npz` holds operands and results. The fused sums are an H200's tensor cores', a sample of `tests/data/`; the
elementary functions are the NumPy oracle's, written from docs/numerics.md alone. `tests/data/make_recorded.py` made it.
The long form of the proof is `tests/test_tensor_core.py` and `tests/gpu/test_numerics.py`.
"""

import dataclasses
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np

from muse_jax.ops.numerics import FUNCTIONS, numerics

RECORDED = Path(__file__).with_name("recorded.npz")

_COUNT = 1 << 16  # drawn inputs of each kind
_OPERAND = {"from_bf16": np.uint16, "from_fp16": np.uint16, "from_e4m3": np.uint8, "from_e2m1": np.uint8}


@dataclasses.dataclass(frozen=True)
class Case:
    """One function on many inputs of one kind."""

    function: str
    """A name of `muse_jax.ops.numerics`."""
    kind: str
    """"recorded", "any bits", ..., for messages."""
    operands: tuple[np.ndarray, ...]


Expected = tuple[Case, np.ndarray]
"""A case and the results it must have."""


@dataclasses.dataclass(frozen=True)
class Comparison:
    """How many results were compared, how many differ, and the first that does."""

    compared: int
    differing: int
    first: str | None
    """Function, kind and index of the input, both results in hexadecimal; None where nothing differs."""


def recorded() -> list[Expected]:
    """The results that are packaged with the library."""
    with np.load(RECORDED) as data:
        arrays = dict(data)
    expected: list[Expected] = []
    for function in FUNCTIONS:
        operands = [arrays[f"{function}.{i}"] for i in range(3) if f"{function}.{i}" in arrays]
        if function.startswith("fsum16"):  # accumulators [tile, 16, 8], A [tile, 16, 16 k], B [tile, 8, 16 k]
            acc, a, b = operands
            a = np.broadcast_to(a[:, :, None, :], (*acc.shape, 16)).reshape(-1, 16)
            b = np.broadcast_to(b[:, None, :, :], (*acc.shape, 16)).reshape(-1, 16)
            operands = [acc.reshape(-1), a, b]
        result = arrays[f"{function}.result"].reshape(-1)
        expected.append((Case(function, "recorded", tuple(operands)), result))
    return expected


def drawn() -> Iterator[Case]:
    """Inputs for comparing two devices: random, and aimed at the corners of the contract's rules."""
    rng = np.random.default_rng(0)
    for function in FUNCTIONS:
        if function.startswith("fsum16"):
            yield from _drawn_sums(function, rng)
            continue
        dtype = _OPERAND.get(function, np.float32)
        operands = [random_bits(rng, dtype, _COUNT) for _ in range(3 if function == "fma" else 1)]
        if function == "to_e4m3":  # defined for x >= 0
            operands = [np.abs(operands[0])]
        yield Case(function, "any bits", tuple(operands))
        if dtype == np.float32:  # random bits are mostly out of the functions' range
            operands = [rng.normal(0, 30, _COUNT).astype(np.float32) for _ in operands]
            yield Case(function, "random", tuple(np.abs(x) if function == "to_e4m3" else x for x in operands))


def _drawn_sums(function: str, rng: np.random.Generator) -> Iterator[Case]:
    format_name = function.removeprefix("fsum16_")
    for width in (4, 28, 250):
        a, b = (spread(rng, format_name, width, (_COUNT, 16)) for _ in range(2))
        scale = 2.0 ** rng.integers(-width, width + 1, _COUNT).clip(-140, 120)
        yield Case(function, f"random (width {width})", ((rng.normal(0, 1, _COUNT) * scale).astype(np.float32), a, b))
    a, b = (random_bits(rng, np.uint16, (_COUNT, 16)) for _ in range(2))
    yield Case(function, "any bits", (random_bits(rng, np.float32, _COUNT), a, b))
    yield Case(function, "corner", corners(format_name))
    # Eight products and their negatives: what is left of the accumulator, or of a product that lost its partner.
    a, b = (spread(rng, format_name, 12, (_COUNT, 16)) for _ in range(2))
    a[:, 8:], b[:, 8:] = a[:, :8] ^ 0x8000, b[:, :8]
    a[::2, 15] = 0
    acc = (rng.normal(0, 1, _COUNT) * 2.0 ** rng.integers(-40, 20, _COUNT)).astype(np.float32)
    yield Case(function, "cancellation", (acc, a, b))


def random_bits(rng: np.random.Generator, dtype: type, shape: int | tuple[int, ...]) -> np.ndarray:
    """Any bits at all: subnormals, infinities and NaNs with payloads too."""
    bits = np.dtype(f"u{np.dtype(dtype).itemsize}")
    return rng.integers(0, 1 << 8 * bits.itemsize, shape, dtype=bits).view(dtype)


def spread(rng: np.random.Generator, format_name: str, width: int, shape: tuple[int, ...]) -> np.ndarray:
    """16-bit operands with exponents spread over `width` values around 1."""
    fraction, bias = {"bf16": (7, 127), "fp16": (10, 15)}[format_name]
    exponent = bias + rng.integers(-(width // 2), width - width // 2, shape)
    exponent = np.clip(exponent, 0, 2 * bias)
    x = (rng.integers(0, 2, shape) << 15) | (exponent << fraction) | rng.integers(0, 1 << fraction, shape)
    return np.where(rng.random(shape) < 0.05, x & 0x8000, x).astype(np.uint16)


def corners(format_name: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Operands of fsum16 at the rules' corners: signed zeros, sums that truncate to zero, overflow, subnormals,
    products of any size that cancel."""
    one = {"bf16": 0x3F80, "fp16": 0x3C00}[format_name]
    tiny, minus = 0x0001, 0x8000
    largest = {"bf16": 0x7F7F, "fp16": 0x7BFF}[format_name]
    rows = []
    for acc in (0x00000000, 0x80000000, 0x00000001, 0x80000001, 0x00800000, 0x80800000, 0x7F7FFFFF, 0xFF7FFFFF):
        for x in (0, minus, tiny, tiny | minus, one, one | minus, largest, largest | minus):
            for y in (0, minus, tiny, tiny | minus, one, largest):
                for count in (0, 1, 2, 16):
                    for fill in (0, minus):
                        a, b = np.full(16, fill, np.uint16), np.full(16, one, np.uint16)
                        a[:count], b[:count] = x, y
                        rows.append((acc, a, b))
        for x in (one, largest):
            for y in (one, largest):
                for rest in (0, tiny, one):
                    a, b = np.full(16, rest, np.uint16), np.full(16, one, np.uint16)
                    a[:2], b[:2] = (x, x | minus), y
                    rows.append((acc, a, b))
    acc, a, b = zip(*rows, strict=True)
    return np.array(acc, np.uint32).view(np.float32), np.stack(a), np.stack(b)


def compute(device: Any, case: Case) -> np.ndarray:
    """The case's results on this device."""
    with jax.default_device(device):
        return np.asarray(numerics(case.function, *(jax.device_put(x, device) for x in case.operands)))


def compare(device: Any, expected: Iterable[Expected]) -> Comparison:
    """Compute every case on the device and compare byte for byte."""
    compared = differing = 0
    first = None
    for case, want in expected:
        bits = np.dtype(f"u{want.dtype.itemsize}")
        have, want = compute(device, case).view(bits), want.view(bits)
        wrong = np.flatnonzero(have != want)
        if first is None and len(wrong):
            i, digits = wrong[0], 2 * bits.itemsize
            first = f"{case.function}, {case.kind} input {i}: 0x{have[i]:0{digits}X} instead of 0x{want[i]:0{digits}X}"
        compared += len(want)
        differing += len(wrong)
    return Comparison(compared, differing, first)
