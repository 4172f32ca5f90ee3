"""The forward pass of DFlash and DFlash2 (arXiv 2602.06036), in plain jax.numpy.

The bits of a draft never influence the target's output, only how much of a draft is accepted. So nothing here needs the
project's bitwise ops: weights and activations are bf16, products accumulate in fp32, and XLA may fuse as it likes.

Shapes: B sequences, T tokens, W rows of a block, G places after the newest token, K candidates, C rows of a context
ring, H hidden size, V vocabulary. Parameters are a flat dict, with the names and shapes of `draft_specs`.
"""

import dataclasses
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np

from muse_jax.speculative.dflash_config import DFlashConfig
from muse_jax.weights.names import BF16, ParamSpec

Weights = Mapping[str, jax.Array]


def draft_specs(config: DFlashConfig) -> dict[str, ParamSpec]:
    """All parameters of a draft, by z-lab's names; all are bf16. The embedding table and LM head are the target's."""
    h, i = config.hidden_size, config.intermediate_size
    q, kv = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
    table: list[tuple[str, tuple[int, ...]]] = [
        ("fc.weight", (h, len(config.tap_layers) * h)), ("hidden_norm.weight", (h,)),
    ]  # fmt: skip
    for layer in range(config.num_layers):
        p = f"layers.{layer}."
        table += [
            (p + "input_layernorm.weight", (h,)), (p + "post_attention_layernorm.weight", (h,)),
            (p + "self_attn.q_proj.weight", (q, h)), (p + "self_attn.k_proj.weight", (kv, h)),
            (p + "self_attn.v_proj.weight", (kv, h)), (p + "self_attn.o_proj.weight", (h, q)),
            (p + "self_attn.q_norm.weight", (config.head_dim,)), (p + "self_attn.k_norm.weight", (config.head_dim,)),
            (p + "mlp.gate_proj.weight", (i, h)), (p + "mlp.up_proj.weight", (i, h)),
            (p + "mlp.down_proj.weight", (h, i)),
        ]  # fmt: skip
        if config.conv_group_size is not None:
            for conv in ("attention_conv.", "mlp_conv."):
                table += [
                    (p + conv + "base_kernel", (2, 2, h)),
                    (p + conv + "kernel_projection.weight", (4 * h // config.conv_group_size, h)),
                ]
    table.append(("norm.weight", (h,)))
    if config.selector_rank is not None:
        codebook = (config.vocab_size, config.selector_rank)
        table += [
            ("candidate_selector.hidden_projection.weight", (config.selector_rank, h)),
            ("candidate_selector.predecessor_codebook", codebook),
            ("candidate_selector.successor_codebook", codebook),
        ]
    return {name: ParamSpec(name, shape, BF16) for name, shape in table}


@dataclasses.dataclass(frozen=True)
class Context:
    """What the draft remembers of the committed tokens: K and V of each layer. A pytree.

    A token at position j lies in row j mod C of a layer's ring. The rows of a block are never written here.
    """

    k: tuple[jax.Array, ...]
    """Each bf16 [B, C, kv_heads, head_dim], after RoPE; C differs between layers."""
    v: tuple[jax.Array, ...]
    position: tuple[jax.Array, ...]
    """Each int32 [B, C]: whose rows these are; -1 for none. So a token that was never observed is never seen."""


jax.tree_util.register_dataclass(Context, ["k", "v", "position"], [])


def empty_context(config: DFlashConfig, batch: int, capacity: int) -> Context:
    """Nothing seen, room for `capacity` positions."""
    sizes = [config.slots(layer, capacity) for layer in range(config.num_layers)]

    def rows() -> tuple[jax.Array, ...]:  # new ones each time: a carry may be donated, and no buffer may be so twice
        shape = (config.num_key_value_heads, config.head_dim)
        return tuple(jnp.zeros((batch, size, *shape), jnp.bfloat16) for size in sizes)

    return Context(rows(), rows(), tuple(jnp.full((batch, size), -1, jnp.int32) for size in sizes))


def inject(
    config: DFlashConfig, params: Weights, context: Context, features: jax.Array, count: jax.Array, first: jax.Array
) -> Context:
    """Adds tokens to the context.

    Args:
        config: the draft's.
        params: its parameters.
        context: before.
        features: bf16 [B, T, E, H].
        count: int32 [B], how many of the T are tokens; of the other rows nothing is kept.
        first: int32 [B], the position of each sequence's first.
    """
    batch, length = features.shape[:2]
    # No norm per layer and no convolution before these projections: the context is the same for all layers.
    shared = linear(features.reshape(batch, length, -1), params["fc.weight"])
    shared = rms_norm(shared, params["hidden_norm.weight"], config.rms_norm_eps)
    row = jnp.arange(length, dtype=jnp.int32)
    position = first[:, None] + row
    sequence = jnp.arange(batch)[:, None]
    ks, vs, positions = [], [], []
    for layer in range(config.num_layers):
        p = f"layers.{layer}.self_attn."
        k = _heads(config, params, p + "k", shared, position)
        v = _split(config, linear(shared, params[p + "v_proj.weight"]))
        size = context.position[layer].shape[1]
        # Of more tokens than the ring holds only the last count: two of them must not want one row.
        kept = (row < count[:, None]) & (row >= count[:, None] - size)
        slot = jnp.where(kept, position % size, size)
        where = (sequence, slot)
        # One NaN in a ring would spoil every draft for a window's length.
        ks.append(context.k[layer].at[where].set(_finite(k), mode="drop"))
        vs.append(context.v[layer].at[where].set(_finite(v), mode="drop"))
        positions.append(context.position[layer].at[where].set(position, mode="drop"))
    return Context(tuple(ks), tuple(vs), tuple(positions))


def hidden_states(
    config: DFlashConfig, params: Weights, context: Context, x: jax.Array, lengths: jax.Array
) -> jax.Array:
    """The block's forward.

    Args:
        config: the draft's.
        params: its parameters.
        context: of everything before the block.
        x: bf16 [B, W, H], plain rows of the embedding table: the newest token's, then the mask's.
        lengths: int32 [B], the position of row 0.

    Returns:
        bf16 [B, W, H], normalised for the LM head. Row t predicts the token at its own position, lengths + t.
    """
    eps = config.rms_norm_eps
    position = lengths[:, None] + jnp.arange(x.shape[1], dtype=jnp.int32)
    for layer in range(config.num_layers):
        p = f"layers.{layer}."
        h = rms_norm(x, params[p + "input_layernorm.weight"], eps)
        before, after = _kernels(config, params, p + "attention_conv.", h)
        a = _attention(config, params, context, layer, convolve(h, before), position)
        x = _round(_wide(x) + _wide(convolve(a, after)))
        h = rms_norm(x, params[p + "post_attention_layernorm.weight"], eps)
        before, after = _kernels(config, params, p + "mlp_conv.", h)
        h = convolve(h, before)
        gate, up = (_wide(linear(h, params[f"{p}mlp.{name}_proj.weight"])) for name in ("gate", "up"))
        y = linear(_round(jax.nn.silu(gate) * up), params[p + "mlp.down_proj.weight"])
        x = _round(_wide(x) + _wide(convolve(y, after)))
    return rms_norm(x, params["norm.weight"], eps)


def _attention(
    config: DFlashConfig, params: Weights, context: Context, layer: int, h: jax.Array, position: jax.Array
) -> jax.Array:
    """Rows [B, W, H] at `position` [B, W] -> [B, W, H]: all of the block, and of the context what is near enough."""
    p = f"layers.{layer}.self_attn."
    batch, width = position.shape
    q = _heads(config, params, p + "q", h, position)
    q = q.reshape(batch, width, config.num_key_value_heads, -1, config.head_dim)
    k = _heads(config, params, p + "k", h, position)
    v = _split(config, linear(h, params[p + "v_proj.weight"]))

    there, window = context.position[layer][:, None, :], config.windows[layer]
    seen = (there >= 0) & (there < position[:, :1, None])
    if window is not None:
        seen &= position[:, :, None] - there < window  # by each row's own position
    far = _dot("bqngd,bcnd->bngqc", q, context.k[layer])
    near = _dot("bqngd,bcnd->bngqc", q, k)
    scores = jnp.concatenate([jnp.where(seen[:, None, None], far, -jnp.inf), near], axis=-1)
    weights = _round(jax.nn.softmax(scores * config.head_dim**-0.5, axis=-1))
    size = there.shape[-1]
    out = _dot("bngqc,bcnd->bqngd", weights[..., :size], context.v[layer])
    out += _dot("bngqc,bcnd->bqngd", weights[..., size:], v)
    return linear(_round(out).reshape(batch, width, -1), params[p + "o_proj.weight"])


def _kernels(config: DFlashConfig, params: Weights, prefix: str, h: jax.Array):
    """A sublayer's kernels before and after it, fp32 [B, W, 2 taps, H] each, both from its normed input; v1: None."""
    if config.conv_group_size is None:
        return None, None
    batch, width, size = h.shape
    c = linear(h, params[prefix + "kernel_projection.weight"])
    c = c.reshape(batch, width, 2, 2, size // config.conv_group_size)
    kernels = _wide(params[prefix + "base_kernel"]) + jnp.repeat(_wide(c), config.conv_group_size, axis=-1)
    return kernels[:, :, 0], kernels[:, :, 1]


def convolve(z: jax.Array, kernel: jax.Array | None) -> jax.Array:
    """Two taps along the block, bf16 [B, W, H] -> the same: tap 0 is the row itself, tap 1 the row before it.

    Row 0 has none before it; `kernel` is fp32 [B, W, 2, H], None for the identity.
    """
    if kernel is None:
        return z
    wide = _wide(z)
    last = jnp.pad(wide, ((0, 0), (1, 0), (0, 0)))[:, :-1]
    return _round(kernel[:, :, 0] * wide + kernel[:, :, 1] * last)


def raw_logits(hidden: jax.Array, head: jax.Array) -> jax.Array:
    """bf16 [B, G, H], bf16 [V, H] -> fp32 [B, G, V] without a NaN, which would count as the largest."""
    logits = _dot("bgh,vh->bgv", hidden, head)
    return jnp.where(jnp.isnan(logits), -jnp.inf, logits)


def candidates(config: DFlashConfig, logits: jax.Array) -> jax.Array:
    """Raw logits fp32 [B, G, V] -> ids int32 [B, G, K] of the largest, in falling order, ties to the lowest id."""
    # top_k orders -0 below 0.
    return jax.lax.top_k(jnp.where(logits == 0, 0.0, logits), config.top_k)[1].astype(jnp.int32)


def target_logits(config: DFlashConfig, raw: jax.Array) -> jax.Array:
    """The target's multiplier and softcap, fp32."""
    cap = config.final_logit_softcapping
    return cap * jnp.tanh(raw * config.output_multiplier / cap)


def marginal_log_probs(config: DFlashConfig, logits: jax.Array, ids: jax.Array) -> jax.Array:
    """DFlash: log-probabilities of the candidates among the whole vocabulary, fp32 [B, G, 1, K]."""
    whole = jax.nn.log_softmax(target_logits(config, logits), axis=-1)
    return jnp.take_along_axis(whole, ids, axis=-1)[:, :, None]


def pair_scores(
    config: DFlashConfig, params: Weights, hidden: jax.Array, logits: jax.Array, ids: jax.Array, token: jax.Array
) -> jax.Array:
    """DFlash2's selector: scores fp32 [B, G, K, K] of each candidate after each candidate of the place before.

    Args:
        config: the draft's.
        params: its parameters.
        hidden: bf16 [B, G, H].
        logits: raw, fp32 [B, G, V].
        ids: int32 [B, G, K].
        token: int32 [B], the newest token: what comes before place 0, in all K rows.
    """
    unary = target_logits(config, jnp.take_along_axis(logits, ids, axis=-1))
    gate = linear(hidden, params["candidate_selector.hidden_projection.weight"])
    first = jnp.broadcast_to(token[:, None, None], ids[:, :1].shape)
    predecessors = jnp.concatenate([first, ids[:, :-1]], axis=1)
    a = _wide(params["candidate_selector.predecessor_codebook"][predecessors]) * _wide(gate)[:, :, None]
    b = _wide(params["candidate_selector.successor_codebook"][ids])
    # The products are fp32; a GPU would round them to TF32.
    pairs = jnp.einsum("bgpr,bgcr->bgpc", a, b, precision=jax.lax.Precision.HIGHEST)
    return unary[:, :, None] + pairs


def linear(x: jax.Array, weight: jax.Array) -> jax.Array:
    """bf16 [..., n], bf16 [m, n] -> bf16 [..., m], accumulated in fp32."""
    return _round(_dot("...n,mn->...m", x, weight))


def rms_norm(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    """bf16 [..., n]: normalised in fp32, rounded, times the plain weight (not 1 + w)."""
    wide = _wide(x)
    normal = _round(wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps))
    return normal * weight


def rotate(x: jax.Array, position: jax.Array, theta: float) -> jax.Array:
    """RoPE, bf16 [B, T, heads, d] at int32 [B, T]: element i is paired with i + d/2 over the whole head."""
    half = x.shape[-1] // 2
    frequency = np.float32(theta ** -(np.arange(half) / half))
    angle = position.astype(jnp.float32)[..., None, None] * frequency
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    low, high = _wide(x[..., :half]), _wide(x[..., half:])
    return _round(jnp.concatenate([low * cos - high * sin, high * cos + low * sin], axis=-1))


def _heads(config: DFlashConfig, params: Weights, name: str, x: jax.Array, position: jax.Array) -> jax.Array:
    """Queries or keys [B, T, heads, d] of rows [B, T, H]: projected, normalised per head, rotated."""
    heads = _split(config, linear(x, params[name + "_proj.weight"]))
    return rotate(rms_norm(heads, params[name + "_norm.weight"], config.rms_norm_eps), position, config.rope_theta)


def _split(config: DFlashConfig, x: jax.Array) -> jax.Array:
    return x.reshape(*x.shape[:-1], -1, config.head_dim)


def _dot(form: str, x: jax.Array, y: jax.Array) -> jax.Array:
    return jnp.einsum(form, x, y, preferred_element_type=jnp.float32)


def _wide(x: jax.Array) -> jax.Array:
    return x.astype(jnp.float32)


def _round(x: jax.Array) -> jax.Array:
    return x.astype(jnp.bfloat16)


def _finite(x: jax.Array) -> jax.Array:
    return jnp.where(jnp.isfinite(x), x, 0)
