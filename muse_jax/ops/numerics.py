"""The contract's functions on raw arrays, for proofs (docs/numerics.md 1, 3 and 4)."""

from __future__ import annotations

import numpy as np

from muse_jax.ops._call import F32, U8, Array, call, check_dtype, check_shape, struct

_U16 = np.dtype(np.uint16)
_UNARY = ((F32,), F32)
_FSUM16 = ((F32, _U16, _U16), F32)

# In the order of ffi/ops/numerics/numerics.h: name -> (operand dtypes, result dtype).
_FUNCTIONS: dict[str, tuple[tuple[np.dtype, ...], np.dtype]] = {
    "exp": _UNARY,
    "sigmoid": _UNARY,
    "silu": _UNARY,
    "tanh": _UNARY,
    "log": _UNARY,
    "rsqrt": _UNARY,
    "fma": ((F32, F32, F32), F32),
    "to_bf16": ((F32,), _U16),
    "from_bf16": ((_U16,), F32),
    "from_fp16": ((_U16,), F32),
    "to_e4m3": ((F32,), U8),
    "from_e4m3": ((U8,), F32),
    "to_e2m1": ((F32,), U8),
    "from_e2m1": ((U8,), F32),
    "fsum16_bf16": _FSUM16,
    "fsum16_fp16": _FSUM16,
}

FUNCTIONS: tuple[str, ...] = tuple(_FUNCTIONS)
"""Names that ``numerics`` takes."""


def numerics(function: str, *operands: Array) -> Array:
    """One function of the contract, element by element.

    ``exp``, ``sigmoid``, ``silu``, ``tanh``, ``log``, ``rsqrt``: fp32 -> fp32. ``fma``: three fp32 -> fp32.
    ``to_bf16``, ``to_e4m3`` (of x >= 0), ``to_e2m1``: fp32 -> raw uint16 or uint8 bits. ``from_bf16``, ``from_fp16``
    (uint16), ``from_e4m3``, ``from_e2m1`` (uint8): raw bits -> fp32. ``fsum16_bf16``, ``fsum16_fp16``: acc fp32 [...]
    and two arrays of raw uint16 bits [..., 16] -> fp32 [...]. All operands have one shape; NaN results are 0x7FFFFFFF.
    Not differentiable.
    """
    if function not in _FUNCTIONS:
        raise ValueError(f"numerics: {function!r} is none of the contract's functions, expected {', '.join(FUNCTIONS)}")
    dtypes, result = _FUNCTIONS[function]
    if len(operands) != len(dtypes):
        raise ValueError(f"numerics: {function} takes {len(dtypes)} operands, got {len(operands)}")
    for i, (x, dtype) in enumerate(zip(operands, dtypes, strict=True)):
        check_dtype(f"numerics {function}", f"operand {i}", x, dtype)
        tail = (16,) if dtype == _U16 and len(dtypes) == 3 else ()
        check_shape(f"numerics {function}", f"operand {i}", x, *operands[0].shape, *tail)
    index = np.int64(FUNCTIONS.index(function))
    return call("muse_numerics_v1", struct(operands[0].shape, result), *operands, function=index)
