"""What all ops share: checks with complete messages, the FFI call, and gradients by an fp32 twin.

Gradients are outside the numerics contract: an op's VJP is the VJP of its *twin*, a few lines of plain ``jax.numpy`` in
fp32 that compute the same function without the contract's roundings (rounding and quantising count as the identity).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import ManualAxisType, NamedSharding, PartitionSpec

from muse_jax import _native  # noqa: F401  (importing it registers the custom calls)

BF16 = np.dtype(jnp.bfloat16)
F32 = np.dtype(np.float32)
I32 = np.dtype(np.int32)
U8 = np.dtype(np.uint8)
E4M3 = np.dtype(jnp.float8_e4m3fn)


def check_dtype(op: str, name: str, x: Any, *allowed: np.dtype) -> None:
    """Raise TypeError unless ``x`` is an array of one of the dtypes."""
    if not hasattr(x, "dtype") or not hasattr(x, "shape"):
        raise TypeError(f"{op}: {name} is a {type(x).__name__}, expected an array of {_either(allowed)}")
    if x.dtype not in allowed:
        raise TypeError(
            f"{op}: {name} has dtype {x.dtype}, expected {_either(allowed)}; cast it first, for instance "
            f"{name}.astype(jnp.{allowed[0].name})"
        )


def check_shape(op: str, name: str, x: Any, *expected: int | str, hint: str = "") -> None:
    """Raise ValueError unless ``x.shape`` matches: ints are exact, strings name free dimensions."""
    fits = len(x.shape) == len(expected) and all(
        isinstance(want, str) or want == have for want, have in zip(expected, x.shape, strict=True)
    )
    if not fits:
        want = "[" + ", ".join(str(e) for e in expected) + "]"
        raise ValueError(f"{op}: {name} has shape {list(x.shape)}, expected {want}{'; ' + hint if hint else ''}")


def check_rank(op: str, name: str, x: Any, least: int, meaning: str) -> None:
    """Raise ValueError unless ``x`` has at least ``least`` dimensions; ``meaning`` says which."""
    if len(x.shape) < least:
        raise ValueError(f"{op}: {name} has shape {list(x.shape)}, expected {meaning}")


def check_multiple(op: str, name: str, size: int, of: int) -> None:
    """Raise ValueError unless ``size`` is a positive multiple of ``of``."""
    if size <= 0 or size % of:
        raise ValueError(f"{op}: {name} is {size}, expected a positive multiple of {of}; pad the model's dimension")


def scalar(op: str, name: str, x: Any, dtype: np.dtype) -> Array:
    """A scalar operand; Python and NumPy numbers are taken too."""
    if isinstance(x, bool | int | float | np.generic):
        x = np.asarray(x, dtype)
    check_dtype(op, name, x, dtype)
    check_shape(op, name, x)
    return jnp.asarray(x)


def flatten(x: Array, keep: int) -> Array:
    """All leading dimensions but the last ``keep`` made one."""
    rows = int(np.prod(x.shape[: x.ndim - keep], dtype=np.int64))
    return x.reshape(rows, *x.shape[x.ndim - keep :])


def struct(shape: Sequence[int], dtype: Any) -> jax.ShapeDtypeStruct:
    """Shape and dtype of one result."""
    return jax.ShapeDtypeStruct(tuple(shape), dtype)


def call(target: str, results: Any, *operands: Array, **attributes: Any) -> Any:
    """One custom call. Attributes must be NumPy scalars of exactly the binding's types."""
    operands, axes = _aligned(operands)
    if axes:
        # Without this the results would pass for replicated, and gradients of what follows would be summed wrongly.
        place = NamedSharding(jax.typeof(operands[0]).sharding.mesh, PartitionSpec())
        varying = ManualAxisType(varying=axes)
        results = jax.tree.map(
            lambda r: jax.ShapeDtypeStruct(r.shape, r.dtype, sharding=place, manual_axis_type=varying), results
        )
    with jax.named_scope(target.removesuffix("_v1")):
        return jax.ffi.ffi_call(target, results, vmap_method="sequential")(*operands, **attributes)


@dataclass(frozen=True)
class Op:
    """A custom call with its gradient.

    ``forward(*operands, **static)`` makes the call. ``twin(*operands, **static)`` is differentiated instead of it, with
    respect to the operands at ``wrt``; all others get no gradient. With ``uses_outputs`` the twin also takes
    ``outputs=``, what the forward pass returned (choices that it must not make again).
    """

    forward: Callable[..., Any]
    twin: Callable[..., Any]
    wrt: tuple[int, ...]
    uses_outputs: bool = False

    def __call__(self, *operands: Array, **static: Any) -> Any:
        """Apply the op; ``static`` values are hashable."""
        operands, _ = _aligned(operands)
        return _apply(self, tuple(sorted(static.items())), *operands)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _apply(op: Op, static: tuple, *operands: Array) -> Any:
    return op.forward(*operands, **dict(static))


def _apply_forward(op: Op, static: tuple, *operands: Array) -> tuple[Any, Any]:
    outputs = op.forward(*operands, **dict(static))
    return outputs, (operands, outputs if op.uses_outputs else None)


def _apply_backward(op: Op, static: tuple, residuals: Any, cotangents: Any) -> tuple:
    operands, outputs = residuals
    gradients: list[Any] = [None] * len(operands)
    if op.wrt:

        def twin(*chosen: Array) -> Any:
            full = list(operands)
            for i, x in zip(op.wrt, chosen, strict=True):
                full[i] = x
            extra = {"outputs": outputs} if op.uses_outputs else {}
            return op.twin(*full, **dict(static), **extra)

        _, pull = jax.vjp(twin, *(operands[i] for i in op.wrt))
        for i, g in zip(op.wrt, pull(cotangents), strict=True):
            gradients[i] = g
    return tuple(gradients)


_apply.defvjp(_apply_forward, _apply_backward)


def f32(x: Array) -> Array:
    """Widened to fp32, for twins."""
    return x.astype(jnp.float32)


def einsum(spec: str, *operands: Array) -> Array:
    """fp32 einsum at full precision, for twins."""
    return jnp.einsum(spec, *operands, precision=jax.lax.Precision.HIGHEST)


def no_twin(*_operands: Array, **_static: Any) -> Any:
    """The twin of an op that passes no gradient (``wrt`` is empty, so this is never called)."""
    raise AssertionError("an op without gradients was differentiated")


def _either(dtypes: Sequence[np.dtype]) -> str:
    return " or ".join(d.name for d in dtypes)


def _aligned(operands: Sequence[Array]) -> tuple[tuple[Array, ...], frozenset]:
    """Operands that vary over the same shard_map axes, and these axes.

    Replicated operands are made varying; the gradient of that is the sum over the axes.
    """
    axes = frozenset().union(*(_axes(x) for x in operands))
    if not axes:
        return tuple(operands), axes
    missing = [tuple(axes - _axes(x)) for x in operands]
    aligned = (jax.lax.pcast(x, m, to="varying") if m else x for x, m in zip(operands, missing, strict=True))
    return tuple(aligned), axes


def _axes(x: Array) -> frozenset:
    aval: Any = jax.typeof(x)
    return frozenset(aval.manual_axis_type.varying)
