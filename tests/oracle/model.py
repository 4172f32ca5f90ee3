"""The decoder, step by step, on one plain sequence (contract section 7)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from .attention import attend, cached, rope_table, rotate
from .elementary import exp, log, sigmoid, tanh
from .formats import R, canonical, widen
from .fsum16 import gemm
from .moe import bf16_expert, choose, combine, nvfp4_expert
from .norms import gain, gained_norm, head_norm, plain_norm, residual_gate, scale_first_norm
from .reduce import fold16, tree8

Weights = Mapping[str, NDArray]
Taps = dict[str, NDArray]


def field(config: Any, name: str) -> Any:
    """A value of a config that is a mapping or has attributes."""
    return config[name] if isinstance(config, Mapping) else getattr(config, name)


def under(weights: Weights, prefix: str) -> dict[str, NDArray]:
    """The tensors whose name starts with ``prefix``, without it."""
    return {name[len(prefix) :]: w for name, w in weights.items() if name.startswith(prefix)}


@np.errstate(all="ignore")
def attention_block(config: Any, layer: int, w: Weights, s: NDArray) -> tuple[NDArray, NDArray, NDArray]:
    """Stream [T, H] fp32, the layer's tensors -> branch n [T, H] bf16, cached k and v [T, kv_heads, 64] bf16."""
    eps, length = field(config, "rms_norm_eps"), len(s)
    if field(config, "head_dim") != 64:
        raise ValueError("a head has 64 elements")
    h = gained_norm(s, gain(w["input_layernorm.weight"]), eps)
    q, k, v, u = (R(gemm(h, w[f"self_attn.{name}_proj.weight"])) for name in ("q", "k", "v", "gate"))
    q, k, v = (x.reshape(length, -1, 64) for x in (q, k, v))
    q, k = R(head_norm(q, eps)), R(head_norm(k, eps))
    theta = field(config, "layer_rope_theta")[layer]
    if theta:
        table = rope_table(np.arange(length), theta)
        q, k = rotate(q, *table), rotate(k, *table)
    k, v = cached(k, v)
    sliding = field(config, "layer_types")[layer] == "sliding_attention"
    window = field(config, "sliding_window") if sliding else None
    a = attend(q, k, v, field(config, "qk_scale_factor"), window)
    o = R(head_norm(a, eps).reshape(length, -1) * sigmoid(widen(u)))
    y = R(gemm(o, w["self_attn.o_proj.weight"]))
    return plain_norm(y, field(config, "post_norm_eps")), k, v


def moe_block(config: Any, w: Weights, s: NDArray) -> tuple[NDArray, NDArray, NDArray]:
    """Stream [T, H] fp32 -> branch [T, H] bf16, chosen experts [T, K] int32 and their weights [T, K] fp32."""
    eps, post_eps = field(config, "rms_norm_eps"), field(config, "post_norm_eps")
    h = gained_norm(s, gain(w["pre_feedforward_layernorm.weight"]), eps)
    chosen, c = choose(
        h,
        w["mlp.gate.weight"],
        w["mlp.gate.e_score_correction_bias"],
        field(config, "num_experts_per_tok"),
        field(config, "output_multiplier"),
        field(config, "routed_scaling_factor"),
    )
    e = gained_norm(R(gemm(h, w["mlp.pre_expert_proj.weight"])), gain(w["mlp.pre_expert_norm.weight"]), eps)
    experts = under(w, "mlp.experts.")
    if experts["gate_up_proj"].dtype == np.uint8:
        expert = nvfp4_expert(experts, field(config, "activation_format"))
    else:
        expert = bf16_expert(experts)
    x = combine(e, chosen, c, expert, gain(experts["post_expert_norm.weight"]), post_eps)
    y = R(gemm(x, w["mlp.post_expert_proj.weight"]))
    return scale_first_norm(y, gain(w["post_feedforward_layernorm.weight"]), post_eps), chosen, c


@np.errstate(all="ignore")
def head(config: Any, weights: Weights, s: NDArray) -> NDArray[np.float32]:
    """Stream [T, H] fp32 -> logits [T, V] fp32."""
    h = gained_norm(R(s), widen(weights["norm.weight"]), field(config, "rms_norm_eps"))
    z = gemm(h, weights["lm_head.weight"]) * np.float32(field(config, "output_multiplier"))
    cap = np.float32(field(config, "final_logit_softcapping"))
    return canonical(cap * tanh(z / cap))


def argmax(logits: NDArray) -> NDArray[np.int32]:
    """[..., V] -> token ids: NaN below all numbers, ties to the lowest id, a row of NaN gives 0."""
    number = ~np.isnan(logits)
    best = np.where(number, logits, -np.inf).max(axis=-1, keepdims=True)
    return np.argmax(number & (logits == best), axis=-1).astype(np.int32)


@np.errstate(all="ignore")
def log_prob(logits: NDArray, token: ArrayLike) -> NDArray[np.float32]:
    """Logits [..., V] fp32, V a multiple of 8, and token ids [...] -> logit - log(tree8 of the segments' exp sums)."""
    token = np.asarray(token)
    terms = exp(logits).reshape(*logits.shape[:-1], 8, -1)
    count = terms.shape[-1]
    acc = np.zeros((*terms.shape[:-1], 16), np.float32)
    for i in range(0, count, 16):
        block = terms[..., i : i + 16]
        acc[..., : block.shape[-1]] = acc[..., : block.shape[-1]] + block
    total = tree8(np.moveaxis(fold16(acc), -1, 0))
    chosen = np.take_along_axis(logits, token[..., None], axis=-1)[..., 0]
    return canonical(chosen - log(total))


def forward(config: Any, weights: Weights, tokens: NDArray) -> Taps:
    """Run ``tokens`` [T] at positions 0..T-1 and return every tap.

    ``weights`` has the Hugging Face names without ``model.language_model.``, with q_proj and k_proj rows in
    adjacent-pair order. A layer whose ``gate_up_proj`` is uint8 is NVFP4.

    Taps: ``embedding`` [T, H] fp32; per layer i ``layers.{i}.k`` and ``.v`` [T, kv_heads, 64] bf16 as cached,
    ``.router_experts`` [T, K] int32 and ``.router_weights`` [T, K] fp32 in descending slot order,
    ``.post_attention_residual`` and ``.post_feedforward_residual`` [T, H] fp32; ``logits`` [T, V] fp32.
    """
    temperature = field(config, "residual_gate_temperature")
    s = widen(plain_norm(weights["embed_tokens.weight"][np.asarray(tokens)], field(config, "rms_norm_eps")))
    taps: Taps = {"embedding": canonical(s)}
    for i in range(field(config, "num_hidden_layers")):
        w = under(weights, f"layers.{i}.")
        n, k, v = attention_block(config, i, w, s)
        s = residual_gate(s, n, w["post_attention_residual_gate.gate"], temperature)
        taps |= {f"layers.{i}.k": k, f"layers.{i}.v": v, f"layers.{i}.post_attention_residual": s}
        n, chosen, c = moe_block(config, w, s)
        s = residual_gate(s, n, w["post_feedforward_residual_gate.gate"], temperature)
        taps |= {f"layers.{i}.router_experts": chosen, f"layers.{i}.router_weights": c}
        taps[f"layers.{i}.post_feedforward_residual"] = s
    taps["logits"] = head(config, weights, s)
    return taps
