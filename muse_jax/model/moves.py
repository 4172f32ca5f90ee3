"""Moving data without touching its bits.

XLA may carry bf16 through fp32 where an operation has no bf16 form (on CPU: all collectives), which rewrites NaNs and,
with some instructions, flushes subnormals. So whatever only moves data does it with integers of the same width.
"""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from muse_jax.mesh import AXIS

Move = Callable[..., jax.Array]

_INTEGERS = {2: jnp.uint16, 4: jnp.uint32}


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def moved(move: Move, x: jax.Array, *indices: jax.Array) -> jax.Array:
    """`move(x, *indices)`, bit for bit, for a `move` that is linear and adds nothing up: gathers, slices, collectives.

    Args:
        move: works on any dtype, closes over no arrays.
        x: of 2 or 4 bytes per element. The gradient of a bf16 or fp32 x flows to it, added up in fp32.
        indices: integer arrays.
    """
    bits = lax.bitcast_convert_type(x, _INTEGERS[x.dtype.itemsize])
    return lax.bitcast_convert_type(move(bits, *indices), x.dtype)


def _forward(move: Move, x: jax.Array, *indices: jax.Array) -> tuple[jax.Array, tuple]:
    return moved(move, x, *indices), (x, indices)


def _backward(move: Move, residuals: tuple, cotangent: jax.Array) -> tuple:
    x, indices = residuals
    _, pull = jax.vjp(lambda x: move(x, *indices), x.astype(jnp.float32))
    (gradient,) = pull(cotangent.astype(jnp.float32))
    return gradient.astype(x.dtype), *(None for _ in indices)


moved.defvjp(_forward, _backward)


def all_tokens(x: jax.Array, length: int | None = None) -> jax.Array:
    """This device's tokens [B, T_local, ...] -> the first `length` (default all) of all devices' [B, T, ...]."""
    return moved(partial(_gather, axis=1, length=length), x)


def all_rows(x: jax.Array) -> jax.Array:
    """This device's rows [rows, ...] -> all devices' rows [devices * rows, ...], device by device."""
    return moved(partial(_gather, axis=0), x)


def bring_home(results: jax.Array, owner: jax.Array) -> jax.Array:
    """Results that every device computed for all rows -> this device's rows, each from the device that owns it.

    Args:
        results: [devices * rows, K, M], in the order of `all_rows`; of interest where this device is the owner.
        owner: int32 [rows, K], the device that computed each of this device's results.

    Returns:
        [rows, K, M].
    """
    return moved(_exchange, results, owner)


def _gather(x: jax.Array, axis: int, length: int | None = None) -> jax.Array:
    return lax.slice_in_dim(lax.all_gather(x, AXIS, axis=axis, tiled=True), 0, length, axis=axis)


def _exchange(results: jax.Array, owner: jax.Array) -> jax.Array:
    mine = lax.all_to_all(results, AXIS, split_axis=0, concat_axis=0, tiled=True)
    by_device = mine.reshape(-1, *owner.shape, mine.shape[-1])
    return lax.select_n(jnp.broadcast_to(owner[..., None], by_device.shape[1:]), *by_device)
