"""Logits and log-probabilities (docs/numerics.md 7, Head and Log-probability)."""

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


def _head(h: Array, w: Array, *, multiplier: np.float32, cap: np.float32) -> Array:
    return call("muse_head_v1", struct((h.shape[0], w.shape[0]), F32), h, w, multiplier=multiplier, cap=cap)


def _head_twin(h: Array, w: Array, *, multiplier: np.float32, cap: np.float32) -> Array:
    return cap * jnp.tanh(einsum("th,vh->tv", f32(h), f32(w)) * multiplier / cap)


def _log_prob(logits: Array, token: Array) -> Array:
    return call("muse_log_prob_v1", struct(token.shape, F32), logits, token)


def _log_prob_twin(logits: Array, token: Array) -> Array:
    return jnp.take_along_axis(jax.nn.log_softmax(logits, axis=-1), token[:, None], axis=-1)[:, 0]


_HEAD = Op(_head, _head_twin, wrt=(0, 1))
_LOG_PROB = Op(_log_prob, _log_prob_twin, wrt=(0,))


def head(h: Array, w: Array, *, multiplier: float, cap: float) -> Array:
    """Soft-capped logits of normalised rows.

    ``h`` bf16 [..., H], H a multiple of 128, ``w`` bf16 [V, H] -> fp32 [..., V]. Gradients flow to both. Contract
    section 7, Head.
    """
    check_dtype("head", "h", h, BF16)
    check_rank("head", "h", h, 1, "[..., H]")
    check_multiple("head", "the hidden size", h.shape[-1], 128)
    check_dtype("head", "w", w, BF16)
    check_shape("head", "w", w, "V", h.shape[-1], hint="one row per token of the vocabulary, as long as a row of h")
    logits = _HEAD(flatten(h, 1), w, multiplier=np.float32(multiplier), cap=np.float32(cap))
    return logits.reshape(*h.shape[:-1], w.shape[0])


def log_prob(logits: Array, token: Array) -> Array:
    """Log-probability of one token per row.

    ``logits`` fp32 [..., V] as ``head`` returns them, V a multiple of 8; ``token`` int32 [...] -> fp32 [...]; a token
    outside the vocabulary gives NaN. The gradient flows to ``logits``. Contract section 7, Log-probability.
    """
    check_dtype("log_prob", "logits", logits, F32)
    check_rank("log_prob", "logits", logits, 1, "[..., V]")
    check_multiple("log_prob", "the vocabulary", logits.shape[-1], 8)
    check_dtype("log_prob", "token", token, I32)
    check_shape("log_prob", "token", token, *logits.shape[:-1], hint="one token per row of logits")
    return _LOG_PROB(flatten(logits, 1), token.reshape(-1)).reshape(token.shape)
