"""The router (docs/numerics.md 7, MoE 2)."""

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

_MAX_CHOICES = 64


def _forward(
    h: Array, w: Array, bias: Array, *, choices: int, multiplier: np.float32, scaling: np.float32
) -> list[Array]:
    rows, experts = h.shape[0], w.shape[0]
    results = [struct((rows, choices), I32), struct((rows, choices), F32), struct((rows, experts), F32)]
    return call("muse_router_v1", results, h, w, bias, multiplier=multiplier, scaling=scaling)


def _twin(
    h: Array,
    w: Array,
    bias: Array,
    *,
    choices: int,
    multiplier: np.float32,
    scaling: np.float32,
    outputs: list[Array],
) -> list[Array]:
    del bias, choices  # the bias only chooses, and the choice is the forward pass's
    logits = einsum("th,eh->te", f32(h), w) * multiplier
    p = jnp.take_along_axis(jax.nn.sigmoid(logits), outputs[0], axis=1)
    return [outputs[0], p / (p.sum(axis=1, keepdims=True) + 1e-15) * scaling, logits]


_ROUTER = Op(_forward, _twin, wrt=(0, 1), uses_outputs=True)


def router(
    h: Array, w: Array, bias: Array, *, experts_per_token: int, multiplier: float, scaling: float
) -> tuple[Array, Array, Array]:
    """Choose experts for every row.

    ``h`` bf16 [..., H], ``w`` fp32 [E, H], ``bias`` fp32 [E] -> expert ids int32 [..., K] by descending key, their
    weights fp32 [..., K] and the logits fp32 [..., E]; K = ``experts_per_token``, at most 64 and at most E. Gradients
    flow through the weights and the logits to ``h`` and ``w``; the bias only chooses. Contract section 7, MoE 2.
    """
    op = "router"
    check_dtype(op, "h", h, BF16)
    check_rank(op, "h", h, 1, "[..., H]")
    check_multiple(op, "the hidden size", h.shape[-1], 128)
    check_dtype(op, "w", w, F32)
    check_shape(op, "w", w, "E", h.shape[-1], hint="one row per expert, as long as a row of h")
    check_dtype(op, "bias", bias, F32)
    check_shape(op, "bias", bias, w.shape[0], hint="one number per expert")
    most = min(w.shape[0], _MAX_CHOICES)
    if not 1 <= experts_per_token <= most:
        raise ValueError(f"{op}: experts_per_token is {experts_per_token}, expected 1 to {most}")
    static = {"multiplier": np.float32(multiplier), "scaling": np.float32(scaling), "choices": int(experts_per_token)}
    experts, weights, logits = _ROUTER(flatten(h, 1), w, bias, **static)
    lead = h.shape[:-1]
    return experts.reshape(*lead, -1), weights.reshape(*lead, -1), logits.reshape(*lead, -1)
