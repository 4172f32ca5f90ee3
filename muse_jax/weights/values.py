"""What the numbers of a weight may be: finite, and scales positive. Anything else is damage or another format."""

import numpy as np

from muse_jax.weights.names import BF16, E4M3, FP32

_CHUNK = 1 << 24  # elements looked at in one go: bounds the memory that the comparison needs


def value_problem(name: str, array: np.ndarray) -> str | None:
    """Why the values of parameter `name` cannot be used, or None. `array` has the dtype of the table of names."""
    if name.endswith("_weight_scale"):
        expected = "block scales that are neither negative nor NaN"
    elif name.endswith("_weight_scale_2"):
        expected = "scales that are finite and not negative"
    elif name.endswith("_input_scale"):
        expected = "scales that are finite and above 0"
    else:
        expected = "finite numbers"
    flat = array.reshape(-1)
    count, first = 0, -1
    for start in range(0, flat.size, _CHUNK):
        bad = _bad(name, flat[start : start + _CHUNK])
        here = int(np.count_nonzero(bad))
        if here and not count:
            first = start + int(np.argmax(bad))
        count += here
    if not count:
        return None
    index = [int(i) for i in np.unravel_index(first, array.shape)]
    return f"expected {expected}, found {count} other(s), the first one {flat[first]} at {index}"


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
