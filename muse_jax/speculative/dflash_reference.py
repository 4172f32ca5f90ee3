"""DFlash and DFlash2 step by step: what the fused call computes, bit for bit (docs/numerics.md 11).

NumPy, in which every fp32 operation is IEEE's, and the project's ops for what is more than that. For tests and proofs:
it runs on the host, waits for every op and cannot be traced.

Shapes: B sequences, T tokens, W rows of a block, G places after the newest token, K candidates, C rows of a context
ring, H hidden size, V vocabulary. Parameters are a flat dict, with the names and shapes of `draft_specs`.
"""

import itertools
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from muse_jax import ops
from muse_jax.speculative.dflash_config import DFlashConfig
from muse_jax.speculative.dflash_model import Context

Weights = Mapping[str, Any]

BF16 = np.dtype(jnp.bfloat16)
CHUNK = 128
"""Keys whose probabilities are summed in one piece."""

_exact = np.errstate(all="ignore")


@_exact
def inject(config: DFlashConfig, params: Weights, context: Context, features: Any, count: Any, first: Any) -> Context:
    """Adds tokens to the context.

    Args:
        config: the draft's.
        params: its parameters.
        context: before.
        features: bf16 [B, T, E, H].
        count: int32 [B], how many of the T are tokens; of the other rows nothing is kept.
        first: int32 [B], the position of each sequence's first.
    """
    features, count, first = (np.asarray(x) for x in (features, count, first))
    batch, length = features.shape[:2]
    if length == 0:
        return context
    # No norm per layer and no convolution before these projections: the context is the same for all layers.
    shared = linear(features.reshape(batch, length, -1), params["fc.weight"])
    shared = rms_norm(shared, params["hidden_norm.weight"], config.rms_norm_eps)
    row = np.arange(length, dtype=np.int32)
    position = first[:, None] + row
    ks, vs, positions = ([np.array(x) for x in layers] for layers in (context.k, context.v, context.position))
    for layer in range(config.num_layers):
        p = f"layers.{layer}.self_attn."
        k = _heads(config, params, p + "k", shared, position)
        v = _split(config, linear(shared, params[p + "v_proj.weight"]))
        size = positions[layer].shape[1]
        # Of more tokens than the ring holds only the last count: two of them must not want one row.
        b, t = np.nonzero((row < count[:, None]) & (row >= count[:, None] - size))
        slot = position[b, t] % size
        # One NaN in a ring would spoil every draft for a window's length.
        ks[layer][b, slot] = _finite(k[b, t])
        vs[layer][b, slot] = _finite(v[b, t])
        positions[layer][b, slot] = position[b, t]
    return Context(*(tuple(jnp.asarray(x) for x in layers) for layers in (ks, vs, positions)))


@_exact
def hidden_states(config: DFlashConfig, params: Weights, context: Context, x: Any, lengths: Any) -> NDArray:
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
    x, eps = np.asarray(x), config.rms_norm_eps
    position = np.asarray(lengths)[:, None] + np.arange(x.shape[1], dtype=np.int32)
    for layer in range(config.num_layers):
        p = f"layers.{layer}."
        h = rms_norm(x, params[p + "input_layernorm.weight"], eps)
        before, after = kernels(config, params, p + "attention_conv.", h)
        a = _attention(config, params, context, layer, convolve(h, before), position)
        x = _round(_wide(x) + _wide(convolve(a, after)))
        h = rms_norm(x, params[p + "post_attention_layernorm.weight"], eps)
        before, after = kernels(config, params, p + "mlp_conv.", h)
        h = convolve(h, before)
        gate, up = (_wide(linear(h, params[f"{p}mlp.{name}_proj.weight"])) for name in ("gate", "up"))
        y = linear(_round(_function("silu", gate) * up), params[p + "mlp.down_proj.weight"])
        x = _round(_wide(x) + _wide(convolve(y, after)))
    return rms_norm(x, params["norm.weight"], eps)


def _attention(
    config: DFlashConfig, params: Weights, context: Context, layer: int, h: NDArray, position: NDArray
) -> NDArray:
    """Rows [B, W, H] at `position` [B, W] -> [B, W, H]: all of the block, and of the context what is near enough."""
    p = f"layers.{layer}.self_attn."
    batch, width = position.shape
    heads, d = config.num_key_value_heads, config.head_dim
    q = _heads(config, params, p + "q", h, position).reshape(batch, width, heads, -1, d)
    k = np.concatenate([np.asarray(context.k[layer]), _heads(config, params, p + "k", h, position)], axis=1)
    v = np.concatenate([np.asarray(context.v[layer]), _split(config, linear(h, params[p + "v_proj.weight"]))], axis=1)

    there, window = np.asarray(context.position[layer])[:, None, :], config.windows[layer]
    seen = (there >= 0) & (there < position[:, :1, None]) & np.ones((1, width, 1), bool)
    if window is not None:
        seen &= position[:, :, None] - there < window  # by each row's own position
    seen = np.concatenate([seen, np.ones((batch, width, width), bool)], axis=2)
    size, group = there.shape[-1], q.shape[3]
    edges = [*range(0, size, CHUNK), size, size + width]  # the block is a chunk of its own
    out = np.zeros(q.shape, BF16)
    for b, head in np.ndindex(batch, heads):
        scores = _gemm(_padded(q[b, :, head].reshape(-1, d)), _padded(k[b, :, head])) * np.float32(d**-0.5)
        scores = np.where(np.repeat(seen[b], group, axis=0), scores, -np.inf)
        parts = [_chunk(scores[:, i:j], seen[b, :, i:j], v[b, i:j, head]) for i, j in itertools.pairwise(edges)]
        most = np.fmax.reduce([part[0] for part in parts])
        total = np.zeros((len(scores), d + 1), np.float32)
        for largest, sums in parts:  # one after the other
            total = _fma(_function("exp", largest - most)[:, None], sums, total)
        out[b, :, head] = _round(total[:, :d] / total[:, d:]).reshape(width, group, d)
    return linear(out.reshape(batch, width, -1), params[p + "o_proj.weight"])


def _chunk(scores: NDArray, seen: NDArray, v: NDArray) -> tuple[NDArray, NDArray]:
    """Scores [rows, n] of up to 128 keys, seen [W, n], v [n, d] -> largest score [rows], sums [rows, d and their
    weights']."""
    largest = np.fmax.reduce(scores, axis=1, initial=np.float32(-np.inf))
    seen = np.repeat(seen, len(scores) // len(seen), axis=0)
    weights = _padded(_round(np.where(seen, _function("exp", scores - largest[:, None]), np.float32(0))))
    ones = np.ones((len(v), 1), BF16)
    return largest, _gemm(weights, _padded(np.concatenate([v, ones], axis=1).T))


@_exact
def kernels(config: DFlashConfig, params: Weights, prefix: str, h: Any) -> Any:
    """A sublayer's kernels before and after it, fp32 [B, W, 2 taps, H] each, both from its normed input; v1: None."""
    if config.conv_group_size is None:
        return None, None
    batch, width, size = h.shape
    c = linear(h, params[prefix + "kernel_projection.weight"])
    c = c.reshape(batch, width, 2, 2, size // config.conv_group_size)
    both = _wide(np.asarray(params[prefix + "base_kernel"])) + np.repeat(_wide(c), config.conv_group_size, axis=-1)
    return both[:, :, 0], both[:, :, 1]


@_exact
def convolve(z: Any, kernel: NDArray | None) -> NDArray:
    """Two taps along the block, bf16 [B, W, H] -> the same: tap 0 is the row itself, tap 1 the row before it.

    Row 0 has none before it; `kernel` is fp32 [B, W, 2, H], None for the identity.
    """
    z = np.asarray(z)
    if kernel is None:
        return z
    wide = _wide(z)
    last = np.pad(wide, ((0, 0), (1, 0), (0, 0)))[:, :-1]
    return _round(kernel[:, :, 0] * wide + kernel[:, :, 1] * last)


@_exact
def lattice(config: DFlashConfig, params: Weights, head: Any, hidden: NDArray, token: Any) -> tuple[NDArray, NDArray]:
    """What the trees are made of, from hidden states bf16 [B, G, H] and newest tokens int32 [B].

    Returns:
        candidates int32 [B, G, K] and their log-probabilities fp32 [B, G, P, K]: for DFlash one row for each place
        (P = 1), for DFlash2 one for each candidate of the place before (P = K).
    """
    ids = candidates(config, raw_logits(hidden, head))
    logits = target_logits(config, hidden, head)
    if not config.is_v2:
        return ids, marginal_log_probs(logits, ids)
    return ids, log_softmax(pair_scores(config, params, hidden, logits, ids, token))


def raw_logits(hidden: Any, head: Any) -> NDArray:
    """bf16 [B, G, H], bf16 [V, H] -> fp32 [B, G, V] without a NaN, which would count as the largest."""
    logits = _gemm(hidden, head)
    return np.where(np.isnan(logits), np.float32(-np.inf), logits)


def candidates(config: DFlashConfig, logits: Any) -> NDArray:
    """Raw logits fp32 [B, G, V] -> ids int32 [B, G, K] of the largest, in falling order, ties to the lowest id."""
    return np.argsort(-np.asarray(logits), axis=-1, kind="stable")[..., : config.top_k].astype(np.int32)


def target_logits(config: DFlashConfig, hidden: Any, head: Any) -> NDArray:
    """As the target's own, with its multiplier and softcap: fp32 [B, G, V]; what is NaN becomes the least, -cap."""
    multiplier, cap = config.output_multiplier, config.final_logit_softcapping
    logits = np.asarray(ops.head(_array(hidden), _array(head), multiplier=multiplier, cap=cap))
    return np.where(np.isnan(logits), np.float32(-cap), logits)


def marginal_log_probs(logits: NDArray, ids: NDArray) -> NDArray:
    """DFlash: log-probabilities of the candidates among the whole vocabulary, fp32 [B, G, 1, K]."""
    whole = jnp.broadcast_to(_array(logits)[:, :, None], (*ids.shape, logits.shape[-1]))
    return np.asarray(ops.log_prob(whole, _array(ids)))[:, :, None]


@_exact
def pair_scores(
    config: DFlashConfig, params: Weights, hidden: Any, logits: NDArray, ids: NDArray, token: Any
) -> NDArray:
    """DFlash2's selector: scores fp32 [B, G, K, K] of each candidate after each candidate of the place before.

    Args:
        config: the draft's.
        params: its parameters.
        hidden: bf16 [B, G, H].
        logits: as of `target_logits`.
        ids: int32 [B, G, K].
        token: int32 [B], the newest token: what comes before place 0, in all K rows.
    """
    unary = np.take_along_axis(logits, ids, axis=-1)
    gate = linear(hidden, params["candidate_selector.hidden_projection.weight"])
    first = np.broadcast_to(np.asarray(token)[:, None, None], ids[:, :1].shape)
    predecessors = np.concatenate([first, ids[:, :-1]], axis=1)
    a = _wide(np.asarray(params["candidate_selector.predecessor_codebook"])[predecessors]) * _wide(gate)[:, :, None]
    b = _wide(np.asarray(params["candidate_selector.successor_codebook"])[ids])
    return unary[:, :, None] + _lanes(a[:, :, :, None], b[:, :, None])


@_exact
def log_softmax(scores: NDArray) -> NDArray:
    """Over the last axis, fp32; the sum goes from the first to the last."""
    least = scores - np.fmax.reduce(scores, axis=-1, keepdims=True, initial=np.float32(-np.inf))
    powers, total = _function("exp", least), np.zeros(scores.shape[:-1], np.float32)
    for k in range(scores.shape[-1]):
        total = total + powers[..., k]
    return least - _function("log", total)[..., None]


def linear(x: Any, weight: Any) -> NDArray:
    """bf16 [..., n], bf16 [m, n] -> bf16 [..., m]."""
    return np.asarray(ops.gemm(_array(x), _array(weight)))


@_exact
def rms_norm(x: Any, weight: Any, eps: float) -> NDArray:
    """bf16 [..., n]: normalised, rounded, times the plain weight (not 1 + w), rounded."""
    normal = np.asarray(ops.rms_norm(_array(x), eps=eps))
    return _round(_wide(normal) * _wide(np.asarray(weight)))


@_exact
def rotate(x: NDArray, position: NDArray, frequencies: NDArray) -> NDArray:
    """RoPE, bf16 [B, T, heads, d] at int32 [B, T]: element i is paired with i + d/2 over the whole head."""
    half = x.shape[-1] // 2
    angle = (position.astype(np.float32)[..., None, None] * frequencies).astype(np.float64)
    cos, sin = np.cos(angle).astype(np.float32), np.sin(angle).astype(np.float32)
    low, high = _wide(x[..., :half]), _wide(x[..., half:])
    return _round(np.concatenate([low * cos - high * sin, low * sin + high * cos], axis=-1))


def _heads(config: DFlashConfig, params: Weights, name: str, x: NDArray, position: NDArray) -> NDArray:
    """Queries or keys [B, T, heads, d] of rows [B, T, H]: projected, normalised per head, rotated."""
    heads = _split(config, linear(x, params[name + "_proj.weight"]))
    wide = _wide(heads)
    mean = _lanes(wide, wide) / np.float32(config.head_dim)
    scale = _function("rsqrt", mean + np.float32(config.rms_norm_eps))[..., None]
    normal = _round(_wide(_round(wide * scale)) * _wide(np.asarray(params[name + "_norm.weight"])))
    return rotate(normal, position, config.frequencies)


def _split(config: DFlashConfig, x: NDArray) -> NDArray:
    return x.reshape(*x.shape[:-1], -1, config.head_dim)


def _lanes(x: NDArray, y: NDArray) -> NDArray:
    """Sums of products over the last axis: sixteen accumulators, folded pairwise (docs/numerics.md 2)."""
    fill = [(0, 0)] * (x.ndim - 1) + [(0, -x.shape[-1] % 16)]
    x, y = np.pad(x, fill), np.pad(y, fill)
    total = np.zeros((*np.broadcast_shapes(x.shape, y.shape)[:-1], 16), np.float32)
    for i in range(0, x.shape[-1], 16):
        total = _fma(x[..., i : i + 16], y[..., i : i + 16], total)
    while total.shape[-1] > 1:
        total = total[..., ::2] + total[..., 1::2]
    return total[..., 0]


def _gemm(x: Any, w: Any) -> NDArray:
    return np.asarray(ops.gemm(_array(x), _array(w), out_dtype=jnp.float32))


def _padded(x: NDArray) -> NDArray:
    """[..., n] with zeros up to n = 128: each eighth of the GEMM's inner dimension is then one block of 16."""
    return np.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, CHUNK - x.shape[-1])])


def _function(name: str, x: NDArray) -> NDArray:
    return np.asarray(ops.numerics(name, _array(x)))


def _fma(a: NDArray, b: NDArray, c: NDArray) -> NDArray:
    return np.asarray(ops.numerics("fma", *(_array(x) for x in np.broadcast_arrays(a, b, c))))


def _array(x: Any) -> Any:
    """On the default device, wherever it comes from."""
    return jnp.asarray(np.asarray(x))


def _wide(x: NDArray) -> NDArray:
    return x.astype(np.float32)


def _round(x: NDArray) -> NDArray:
    return x.astype(BF16)


def _finite(x: NDArray) -> NDArray:
    return np.where(np.isfinite(_wide(x)), x, BF16.type(0))
