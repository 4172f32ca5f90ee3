"""Combination of the chosen experts' outputs (docs/numerics.md 7, MoE 5)."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from muse_jax.ops._call import (
    BF16,
    F32,
    I32,
    Array,
    Op,
    call,
    check_dtype,
    check_multiple,
    check_rank,
    check_shape,
    einsum,
    f32,
    flatten,
    struct,
)


def _forward(f: Array, weights: Array, experts: Array, gain: Array, *, eps: np.float32) -> Array:
    return call("muse_combine_v1", struct((f.shape[0], f.shape[2]), BF16), f, weights, experts, gain, eps=eps)


def _twin(f: Array, weights: Array, experts: Array, gain: Array, *, eps: np.float32) -> Array:
    del experts  # they only order the sum
    z = f32(f) * (f32(gain) + 1)
    z = z * jax.lax.rsqrt(jnp.mean(z * z, axis=-1, keepdims=True) + eps)
    return einsum("tk,tkm->tm", weights, z).astype(jnp.bfloat16)


_COMBINE = Op(_forward, _twin, wrt=(0, 1, 3))


def combine(f: Array, weights: Array, experts: Array, gain: Array, *, eps: float) -> Array:
    """Normalise each expert's output and add them up by weight, in ascending expert id.

    ``f`` bf16 [..., K, M], M a multiple of 128, K at most 64; ``weights`` fp32 and ``experts`` int32 [..., K] from
    ``router``; ``gain`` bf16 [M], zero-centred (post_expert_norm); ``eps`` is post_norm_eps -> bf16 [..., M]. Gradients
    flow to f, weights and gain. Contract section 7, MoE 5.
    """
    op = "combine"
    check_dtype(op, "f", f, BF16)
    check_rank(op, "f", f, 2, "[..., K, M]")
    check_multiple(op, "the MoE hidden size", f.shape[-1], 128)
    if f.shape[-2] > 64:
        raise ValueError(f"{op}: f has {f.shape[-2]} experts per token, expected at most 64")
    check_dtype(op, "weights", weights, F32)
    check_dtype(op, "experts", experts, I32)
    for name, x in (("weights", weights), ("experts", experts)):
        check_shape(op, name, x, *f.shape[:-1], hint="one number per expert output in f")
    check_dtype(op, "gain", gain, BF16)
    check_shape(op, "gain", gain, f.shape[-1], hint="one gain per column of f")
    x = _COMBINE(flatten(f, 2), flatten(weights, 1), flatten(experts, 1), gain, eps=np.float32(eps))
    return x.reshape(*f.shape[:-2], f.shape[-1])
