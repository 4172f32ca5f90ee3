"""What the numbers of a weight may be: finite, and scales positive. Anything else is damage or another format."""

import dataclasses
from collections.abc import Iterable

import numpy as np

from muse_jax.weights.names import BF16, E4M3, FP32

_CHUNK = 1 << 24  # elements looked at in one go: bounds the memory that the comparison needs


@dataclasses.dataclass(frozen=True)
class BadValues:
    """Numbers that cannot be a weight's, in some rows of it."""

    count: int
    index: tuple[int, ...]
    """Of the first one, in the whole array."""
    value: str
    """The first one."""


def bad_values(name: str, rows: np.ndarray, start: int = 0) -> BadValues | None:
    """Those in `rows`, which begin at row `start` of parameter `name` and have the dtype of the table of names."""
    flat = rows.reshape(-1)
    count, first = 0, -1
    for begin in range(0, flat.size, _CHUNK):
        bad = _bad(name, flat[begin : begin + _CHUNK])
        here = int(np.count_nonzero(bad))
        if here and not count:
            first = begin + int(np.argmax(bad))
        count += here
    if not count:
        return None
    index = [int(i) for i in np.unravel_index(first, rows.shape)]
    return BadValues(count, (index[0] + start, *index[1:]), f"{flat[first]}")


def describe(name: str, found: Iterable[BadValues]) -> str:
    """One problem of all that was found in a parameter."""
    if name.endswith("_weight_scale"):
        expected = "block scales that are neither negative nor NaN"
    elif name.endswith("_weight_scale_2"):
        expected = "scales that are finite and not negative"
    elif name.endswith("_input_scale"):
        expected = "scales that are finite and above 0"
    else:
        expected = "finite numbers"
    found = sorted(found, key=lambda bad: bad.index)
    count, first = sum(bad.count for bad in found), found[0]
    return f"expected {expected}, found {count} other(s), the first one {first.value} at {list(first.index)}"


def _bad(name: str, chunk: np.ndarray) -> np.ndarray:
    if chunk.dtype == E4M3:
        return chunk.view(np.uint8) >= 0x7F  # 0x7F is NaN, from 0x80 on the sign bit is set
    if chunk.dtype == BF16:
        return (chunk.view(np.uint16) & 0x7F80) == 0x7F80
    if chunk.dtype != FP32:
        return np.zeros(chunk.shape, bool)  # every byte is two valid codes
    bad = ~np.isfinite(chunk)
    if name.endswith("_weight_scale_2"):
        bad |= chunk < 0
    elif name.endswith("_input_scale"):
        bad |= chunk <= 0
    return bad
