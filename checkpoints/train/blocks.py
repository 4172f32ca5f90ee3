"""DFlash2's forward and its loss in plain JAX: differentiable, and for many blocks of a sequence at once.

The library's own (`muse_jax/speculative/dflash_reference.py`, the fused call) computes the same with the contract's
roundings, of which there are none here but the weights'. Shapes: B sequences of S tokens, N blocks in each of W rows, E
tapped layers, K candidates, H hidden size, V vocabulary.
"""

from collections.abc import Mapping

import jax
import jax.numpy as jnp

from muse_jax.speculative import DFlashConfig

Weights = Mapping[str, jax.Array]

DECAY = 7.0
"""Places later in a block whose loss counts a factor e less."""


def hidden_states(
    config: DFlashConfig, params: Weights, features: jax.Array, rows: jax.Array, anchors: jax.Array
) -> jax.Array:
    """The blocks' forward.

    Args:
        config: the draft's.
        params: as in `muse_jax.speculative.dflash_model.draft_specs`, in fp32.
        features: bf16 [B, S, E, H], the target's stream after the tapped layers.
        rows: [B, N, W, H], plain rows of the target's table: the anchor's, then the mask's.
        anchors: int32 [B, N], positions of the blocks' first rows; a block sees the context before its own.

    Returns:
        fp32 [B, N, W, H], normalised for the LM head. Row t predicts the token at its own position, anchor + t.
    """
    batch, length = features.shape[:2]
    eps, x = config.rms_norm_eps, rows.astype(jnp.float32)
    context = _linear(features.reshape(batch, length, -1).astype(jnp.float32), params["fc.weight"])
    context = _norm(context, params["hidden_norm.weight"], eps)
    position = anchors[..., None] + jnp.arange(x.shape[2])  # [B, N, W]
    for layer in range(config.num_layers):
        p = f"layers.{layer}."
        h = _norm(x, params[p + "input_layernorm.weight"], eps)
        before, after = _kernels(config, params, p + "attention_conv.", h)
        a = _attention(config, params, layer, context, _convolve(h, before), position)
        x = x + _convolve(a, after)
        h = _norm(x, params[p + "post_attention_layernorm.weight"], eps)
        before, after = _kernels(config, params, p + "mlp_conv.", h)
        h = _convolve(h, before)
        gate, up = (_linear(h, params[f"{p}mlp.{name}_proj.weight"]) for name in ("gate", "up"))
        x = x + _convolve(_linear(jax.nn.silu(gate) * up, params[p + "mlp.down_proj.weight"]), after)
    return _norm(x, params["norm.weight"], eps)


def block_loss(
    config: DFlashConfig, params: Weights, head: jax.Array, hidden: jax.Array, tokens: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Cross entropy of every place's token, and of the selector's choice among its candidates.

    A place's weight falls with its distance from the anchor, because its token is of use only where all before it were
    right. Where the token is no candidate, the selector learns nothing.

    Args:
        config: the draft's.
        params: as of `hidden_states`.
        head: bf16 [V, H], the target's.
        hidden: fp32 [B, N, W, H], from `hidden_states`.
        tokens: int32 [B, N, W], those at the rows' positions: the anchors, and what comes after them.

    Returns:
        (loss, tokens that a step would bring on average if the selector's first choices were followed).
    """
    hidden, last, tokens = hidden[:, :, 1:], tokens[:, :, :-1], tokens[:, :, 1:]
    cap = config.final_logit_softcapping
    logits = cap * jnp.tanh(_linear(hidden, head.astype(jnp.float32)) * config.output_multiplier / cap)
    unary, ids = jax.lax.top_k(logits, config.top_k)
    gate = _linear(hidden, params["candidate_selector.hidden_projection.weight"])
    a = params["candidate_selector.predecessor_codebook"][last] * gate
    scores = unary + jnp.einsum("bntr,bntkr->bntk", a, params["candidate_selector.successor_codebook"][ids])
    found = ids == tokens[..., None]
    chosen = jnp.where(found.any(-1), -jnp.where(found, jax.nn.log_softmax(scores), 0).sum(-1), 0)
    plain = -jnp.take_along_axis(jax.nn.log_softmax(logits), tokens[..., None], axis=-1)[..., 0]
    weight = jnp.exp(-jnp.arange(tokens.shape[-1]) / DECAY)
    loss = jnp.mean((plain + chosen) @ weight) / weight.sum()
    best = jnp.take_along_axis(ids, jnp.argmax(scores, axis=-1)[..., None], axis=-1)[..., 0]
    run = jnp.cumprod(best == tokens, axis=-1).sum(-1)
    return loss, 1 + jnp.mean(run)


def _attention(
    config: DFlashConfig, params: Weights, layer: int, context: jax.Array, h: jax.Array, position: jax.Array
) -> jax.Array:  # fmt: skip
    p, window = f"layers.{layer}.self_attn.", config.windows[layer]
    there = jnp.arange(context.shape[1])
    q = _heads(config, params, p + "q", h, position)
    q = q.reshape(*q.shape[:3], config.num_key_value_heads, -1, config.head_dim) * config.head_dim**-0.5
    k, own_k = _heads(config, params, p + "k", context, there), _heads(config, params, p + "k", h, position)
    v, own_v = (_split(config, _linear(rows, params[p + "v_proj.weight"])) for rows in (context, h))
    seen = there < position[:, :, :1, None]
    if window is not None:
        seen = seen & (position[..., None] - there < window)  # by each row's own position
    seen = seen[:, :, :, None, None]
    scores = jnp.where(seen, jnp.einsum("bnthgd,bshd->bnthgs", q, k), -jnp.inf)
    own = jnp.einsum("bnthgd,bnuhd->bnthgu", q, own_k)
    weights = jax.nn.softmax(jnp.concatenate([scores, own], axis=-1), axis=-1)
    weights, own_weights = jnp.split(weights, [len(there)], axis=-1)
    out = jnp.einsum("bnthgs,bshd->bnthgd", weights, v) + jnp.einsum("bnthgu,bnuhd->bnthgd", own_weights, own_v)
    return _linear(out.reshape(*h.shape[:3], -1), params[p + "o_proj.weight"])


def _kernels(config: DFlashConfig, params: Weights, prefix: str, h: jax.Array) -> tuple[jax.Array, jax.Array]:
    """A sublayer's kernels before and after it, [B, N, W, 2 taps, H] each, both from its normed input."""
    assert config.conv_group_size is not None
    c = _linear(h, params[prefix + "kernel_projection.weight"])
    c = c.reshape(*h.shape[:-1], 2, 2, h.shape[-1] // config.conv_group_size)
    both = params[prefix + "base_kernel"] + jnp.repeat(c, config.conv_group_size, axis=-1)
    return both[..., 0, :, :], both[..., 1, :, :]


def _convolve(z: jax.Array, kernel: jax.Array) -> jax.Array:
    """Two taps along the block: a row itself and the one before it, of which row 0 has none."""
    last = jnp.pad(z, ((0, 0), (0, 0), (1, 0), (0, 0)))[:, :, :-1]
    return kernel[..., 0, :] * z + kernel[..., 1, :] * last


def _heads(config: DFlashConfig, params: Weights, name: str, x: jax.Array, position: jax.Array) -> jax.Array:
    """Queries or keys of rows: projected, normalised per head, rotated by pairs i and i + d/2."""
    heads = _norm(
        _split(config, _linear(x, params[name + "_proj.weight"])), params[name + "_norm.weight"], config.rms_norm_eps
    )
    angle = position[..., None, None].astype(jnp.float32) * config.frequencies
    low, high = jnp.split(heads, 2, axis=-1)
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    return jnp.concatenate([low * cos - high * sin, low * sin + high * cos], axis=-1)


def _split(config: DFlashConfig, x: jax.Array) -> jax.Array:
    return x.reshape(*x.shape[:-1], -1, config.head_dim)


def _norm(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + eps) * weight


def _linear(x: jax.Array, weight: jax.Array) -> jax.Array:
    return x @ weight.T
