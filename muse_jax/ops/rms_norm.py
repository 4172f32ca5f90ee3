"""RMS norms of whole rows (docs/numerics.md 6)."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from muse_jax.ops._call import (
    BF16,
    F32,
    Array,
    Op,
    call,
    check_dtype,
    check_multiple,
    check_rank,
    check_shape,
    f32,
    flatten,
    struct,
)


def _forward(x: Array, gain: Array, *, eps: np.float32, scale_first: bool, round_input: bool, centred: bool) -> Array:
    return call(
        "muse_rms_norm_v1",
        struct(x.shape, BF16),
        x,
        gain,
        eps=eps,
        kind=np.int64(scale_first),
        round_input=np.bool_(round_input),
        centred=np.bool_(centred),
    )


def _twin(x: Array, gain: Array, *, eps: np.float32, scale_first: bool, round_input: bool, centred: bool) -> Array:
    del round_input
    x, g = f32(x), f32(gain) + 1 if centred else f32(gain)
    if scale_first:
        x = x * g
    y = x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + eps)
    return (y if scale_first or not gain.size else y * g).astype(jnp.bfloat16)


_RMS_NORM = Op(_forward, _twin, wrt=(0, 1))


def rms_norm(
    x: Array,
    gain: Array | None = None,
    *,
    eps: float,
    centred: bool = True,
    scale_first: bool = False,
    round_input: bool = False,
) -> Array:
    """RMS norm over the last dimension.

    ``x`` fp32 or bf16 [..., N], N a multiple of 128; ``gain`` bf16 [N] or None -> bf16 [..., N]. With ``centred`` the
    gain is ``1 + gain``. ``scale_first`` applies the gain before the norm (``x`` bf16); ``round_input`` rounds an fp32
    ``x`` to bf16 first. Gradients flow to both. Contract section 6.
    """
    op = "rms_norm"
    check_dtype(op, "x", x, BF16, F32)
    check_rank(op, "x", x, 1, "[..., N]")
    check_multiple(op, "the row length", x.shape[-1], 128)
    if gain is None:
        gain = jnp.zeros((0,), BF16)
    else:
        check_dtype(op, "gain", gain, BF16)
        check_shape(op, "gain", gain, x.shape[-1], hint="one gain per column of x")
    if scale_first and (x.dtype != BF16 or not gain.size):
        raise ValueError(
            f"{op}: scale_first needs a bfloat16 x and a gain; x is {x.dtype}, gain has {gain.size} numbers"
        )
    static = {"scale_first": bool(scale_first), "round_input": bool(round_input), "centred": bool(centred)}
    return _RMS_NORM(flatten(x, 1), gain, eps=np.float32(eps), **static).reshape(x.shape)
