"""DFlash and DFlash2 drafts of one sequence, row by row in float64 with the roundings to bf16 that the model has.

Weights are a mapping with z-lab's tensor names; the configuration is any object with the fields read here. Contexts are
kept whole, by position, so there is no ring here to be wrong in the same way.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .formats import R

Weights = Mapping[str, NDArray]
Context = list[dict[int, tuple[NDArray, NDArray]]]
"""Per layer: position -> (K, V) of that token, [kv_heads, head_dim] each."""


def to_bf16(x: NDArray) -> NDArray[np.float64]:
    """The nearest bf16 value, as float64."""
    return R(np.asarray(x, np.float64).astype(np.float32)).astype(np.float64)


def linear(x: NDArray, w: NDArray) -> NDArray[np.float64]:
    """[..., n] and [m, n] -> [..., m], rounded."""
    return to_bf16(np.asarray(x, np.float64) @ np.asarray(w, np.float64).T)


def rms_norm(x: NDArray, w: NDArray, eps: float) -> NDArray[np.float64]:
    """Normalise, round, times the plain weight, round."""
    x = np.asarray(x, np.float64)
    normal = to_bf16(x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps))
    return to_bf16(normal * np.asarray(w, np.float64))


def rope(x: NDArray, position: int, theta: float) -> NDArray[np.float64]:
    """[heads, d] at one position: element i turns with element i + d/2 (NeoX pairing)."""
    half = x.shape[-1] // 2
    out = np.empty_like(x)
    for i in range(half):
        angle = position * theta ** (-i / half)
        a, b = x[:, i], x[:, i + half]
        out[:, i] = a * np.cos(angle) - b * np.sin(angle)
        out[:, i + half] = b * np.cos(angle) + a * np.sin(angle)
    return to_bf16(out)


def taps(layers: int, count: int) -> list[int]:
    """Evenly spaced from layer 1 to layer L - 3, halves to even; one tap: the middle."""
    if count == 1:
        return [layers // 2]
    return [round(1 + k * (layers - 4) / (count - 1)) for k in range(count)]


def heads(x: NDArray, w: Weights, prefix: str, config: Any, position: int | None, name: str) -> NDArray[np.float64]:
    """One row's queries, keys or values: projected, and normalised and turned if it has a position."""
    out = linear(x, w[f"{prefix}self_attn.{name}_proj.weight"]).reshape(-1, config.head_dim)
    if position is None:
        return out
    return rope(
        rms_norm(out, w[f"{prefix}self_attn.{name}_norm.weight"], config.rms_norm_eps), position, config.rope_theta
    )


def new_context(config: Any) -> Context:
    """Nothing seen yet."""
    return [{} for _ in config.windows]


def inject(config: Any, w: Weights, context: Context, features: NDArray, first: int) -> None:
    """Adds the tokens at `first`, `first` + 1, ... with features [T, E, H] to the context."""
    for t, feature in enumerate(features):
        row = linear(np.concatenate(list(feature)), w["fc.weight"])
        row = rms_norm(row, w["hidden_norm.weight"], config.rms_norm_eps)
        for i, layer in enumerate(context):
            k = heads(row, w, f"layers.{i}.", config, first + t, "k")
            layer[first + t] = (k, heads(row, w, f"layers.{i}.", config, None, "v"))


def attention(q: NDArray, keys: list[NDArray], values: list[NDArray]) -> NDArray[np.float64]:
    """One row: q [heads, d], lists of [kv_heads, d] -> [heads * d], rounded."""
    group = q.shape[0] // keys[0].shape[0]
    out = []
    for head, query in enumerate(q):
        scores = np.array([query @ k[head // group] for k in keys]) * q.shape[1] ** -0.5
        p = to_bf16(np.exp(scores - scores.max()))
        out.append(sum(weight * v[head // group] for weight, v in zip(p, values, strict=True)) / p.sum())
    return to_bf16(np.concatenate(out))


class Convolution:
    """The two sides of one sublayer's dynamic convolution; coefficients from the normed input h [rows, H]."""

    def __init__(self, config: Any, w: Weights, prefix: str, h: NDArray):
        self.on = config.conv_group_size is not None
        if self.on:
            self.group = config.conv_group_size
            rows, size = h.shape
            self.base = np.asarray(w[prefix + "base_kernel"], np.float64)
            self.c = linear(h, w[prefix + "kernel_projection.weight"]).reshape(rows, 2, 2, size // self.group)

    def __call__(self, z: NDArray, side: int) -> NDArray[np.float64]:
        if not self.on:
            return z
        out = np.empty_like(z)
        for i in range(z.shape[0]):
            before = z[i - 1] if i > 0 else np.zeros_like(z[0])
            for ch in range(z.shape[1]):
                g = ch // self.group
                own, last = (self.base[side, tap, ch] + self.c[i, side, tap, g] for tap in (0, 1))
                out[i, ch] = own * z[i, ch] + last * before[ch]
        return to_bf16(out)


def silu(x: NDArray) -> NDArray[np.float64]:
    return x / (1 + np.exp(-x))


def hidden(config: Any, w: Weights, context: Context, x: NDArray, length: int) -> NDArray[np.float64]:
    """The block's embeddings x [rows, H], its first row at position `length` -> final hidden states [rows, H]."""
    x = np.asarray(x, np.float64)
    rows, eps = x.shape[0], config.rms_norm_eps
    for i, window in enumerate(config.windows):
        p = f"layers.{i}."
        h = rms_norm(x, w[p + "input_layernorm.weight"], eps)
        conv = Convolution(config, w, p + "attention_conv.", h)
        h = conv(h, 0)
        block = [
            (heads(h[t], w, p, config, length + t, "k"), heads(h[t], w, p, config, None, "v")) for t in range(rows)
        ]
        out = []
        for t in range(rows):
            q = heads(h[t], w, p, config, length + t, "q")
            seen = [
                kv for j, kv in sorted(context[i].items()) if j < length and (window is None or length + t - j < window)
            ]
            keys, values = zip(*seen, *block, strict=True)
            out.append(attention(q, list(keys), list(values)))
        a = linear(np.stack(out), w[p + "self_attn.o_proj.weight"])
        x = to_bf16(x + conv(a, 1))
        h = rms_norm(x, w[p + "post_attention_layernorm.weight"], eps)
        conv = Convolution(config, w, p + "mlp_conv.", h)
        h = conv(h, 0)
        gate, up = (linear(h, w[f"{p}mlp.{name}_proj.weight"]) for name in ("gate", "up"))
        y = linear(to_bf16(silu(gate) * up), w[p + "mlp.down_proj.weight"])
        x = to_bf16(x + conv(y, 1))
    return rms_norm(x, w["norm.weight"], eps)


def transform(config: Any, u: NDArray) -> NDArray[np.float64]:
    """Raw logits -> the target's logits."""
    cap = config.final_logit_softcapping
    return cap * np.tanh(u * config.output_multiplier / cap)


def raw_logits(hid: NDArray, head: NDArray) -> NDArray[np.float64]:
    """Hidden states [slots, H] and head [V, H], not rounded."""
    return np.asarray(hid, np.float64) @ np.asarray(head, np.float64).T


def candidates(u: NDArray, count: int) -> NDArray[np.int32]:
    """Raw logits [slots, V] -> ids [slots, K] of the largest, descending, ties to the lowest id."""
    rows = [sorted(range(len(row)), key=lambda v, row=row: (-row[v], v))[:count] for row in u]
    return np.array(rows, np.int32)


def log_softmax(x: NDArray) -> NDArray[np.float64]:
    """Over the last axis."""
    x = x - x.max(axis=-1, keepdims=True)
    return x - np.log(np.exp(x).sum(axis=-1, keepdims=True))


def marginals(config: Any, u: NDArray, ids: NDArray) -> NDArray[np.float64]:
    """DFlash: log-probabilities [slots, 1, K] over the full vocabulary."""
    return np.take_along_axis(log_softmax(transform(config, u)), ids.astype(np.int64), axis=-1)[:, None]


def pair_scores(config: Any, w: Weights, hid: NDArray, u: NDArray, ids: NDArray, anchor: int) -> NDArray[np.float64]:
    """DFlash2: scores [slots, K predecessors, K] before the log-softmax."""
    slots, count = ids.shape
    gate = linear(hid, w["candidate_selector.hidden_projection.weight"])
    a = np.asarray(w["candidate_selector.predecessor_codebook"], np.float64)
    b = np.asarray(w["candidate_selector.successor_codebook"], np.float64)
    scores = np.empty((slots, count, count))
    for e in range(slots):
        for p in range(count):
            predecessor = anchor if e == 0 else ids[e - 1, p]
            for c in range(count):
                unary = transform(config, u[e, ids[e, c]])
                scores[e, p, c] = unary + np.sum(a[predecessor] * gate[e] * b[ids[e, c]])
    return scores
