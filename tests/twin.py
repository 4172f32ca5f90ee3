"""A smooth fp32 twin of the model in plain jax.numpy, for gradients: no rounding, no fixed order, routing given."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from oracle import quant
from oracle.attention import rope_table


def dequantised(weights: dict[str, np.ndarray], name: str) -> np.ndarray:
    """An expert array's fp32 values: codes times both scales."""
    w = quant.dequantise(weights[name], weights[name + "_weight_scale"]).astype(np.float32)
    scale_2 = weights[name + "_weight_scale_2"].reshape(len(w), -1)
    return w * np.repeat(scale_2, w.shape[1] // scale_2.shape[1], axis=1)[..., None]


def norm(x, eps, gain=1.0):
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + eps) * gain


def rotate(x, cos, sin):
    a, b = x[..., 0::2], x[..., 1::2]
    cos, sin = cos[:, None], sin[:, None]
    return jnp.stack([a * cos - b * sin, a * sin + b * cos], axis=-1).reshape(x.shape)


def residual(s, n, gate, temperature):
    beta = jax.nn.sigmoid(gate / temperature)
    return jnp.sqrt(jnp.maximum(1 - beta * beta, 1e-3)) * s + beta * n


def attention(config, i, w, h):
    """h [B, T, H] -> n [B, T, H]."""
    batch, length, _ = h.shape
    eps = config.rms_norm_eps
    q, k, v, u = (h @ w[f"self_attn.{name}_proj.weight"].T for name in ("q", "k", "v", "gate"))
    q, k, v = (x.reshape(batch, length, -1, 64) for x in (q, k, v))
    q, k = norm(q, eps), norm(k, eps)
    if config.layer_rope_theta[i]:
        table = rope_table(np.arange(length), config.layer_rope_theta[i])
        q, k = rotate(q, *table), rotate(k, *table)
    group = q.shape[2] // k.shape[2]
    k, v = jnp.repeat(k, group, axis=2), jnp.repeat(v, group, axis=2)
    score = jnp.einsum("bqhd,bkhd->bhqk", q, k) * config.qk_scale_factor / 8
    distance = np.arange(length)[:, None] - np.arange(length)
    window = config.sliding_window if config.layer_types[i] == "sliding_attention" else length
    seen = (distance >= 0) & (distance < window)
    p = jax.nn.softmax(jnp.where(seen, score, -jnp.inf), axis=-1)
    a = norm(jnp.einsum("bhqk,bkhd->bqhd", p, v), eps)
    o = a.reshape(batch, length, -1) * jax.nn.sigmoid(u)
    return norm(o @ w["self_attn.o_proj.weight"].T, config.post_norm_eps)


def moe(config, w, h, chosen):
    """h [B, T, H] and chosen experts [B, T, K] -> y [B, T, H], before the last norm."""
    p = jax.nn.sigmoid(h @ w["mlp.gate.weight"].T * config.output_multiplier)
    p = jnp.take_along_axis(p, jnp.asarray(chosen), axis=-1)
    c = p / jnp.sum(p, axis=-1, keepdims=True) * config.routed_scaling_factor
    e = norm(h @ w["mlp.pre_expert_proj.weight"].T, config.rms_norm_eps, 1 + w["mlp.pre_expert_norm.weight"])
    gate, up = jnp.split(jnp.einsum("btm,enm->bten", e, w["mlp.experts.gate_up_proj"]), 2, axis=-1)
    f = jnp.einsum("bten,emn->btem", jax.nn.silu(gate) * up, w["mlp.experts.down_proj"])
    f = norm(f * (1 + w["mlp.experts.post_expert_norm.weight"]), config.post_norm_eps)
    x = jnp.einsum("btkm,btk->btm", jnp.take_along_axis(f, jnp.asarray(chosen)[..., None], axis=2), c)
    return x @ w["mlp.post_expert_proj.weight"].T


def log_probs(config, weights, tokens, routing):
    """fp32 weights by name, tokens [B, T], chosen experts per layer [B, T, K] -> log-probabilities [B, T - 1]."""
    eps, post_eps = config.rms_norm_eps, config.post_norm_eps
    s = norm(weights["embed_tokens.weight"][tokens], eps)
    for i in range(config.num_hidden_layers):
        prefix = f"layers.{i}."
        w = {name[len(prefix) :]: value for name, value in weights.items() if name.startswith(prefix)}
        n = attention(config, i, w, norm(s, eps, 1 + w["input_layernorm.weight"]))
        s = residual(s, n, w["post_attention_residual_gate.gate"], config.residual_gate_temperature)
        y = moe(config, w, norm(s, eps, 1 + w["pre_feedforward_layernorm.weight"]), routing[i])
        n = norm(y * (1 + w["post_feedforward_layernorm.weight"]), post_eps)
        s = residual(s, n, w["post_feedforward_residual_gate.gate"], config.residual_gate_temperature)
    z = norm(s, eps, weights["norm.weight"]) @ weights["lm_head.weight"].T
    logits = config.final_logit_softcapping * jnp.tanh(z * config.output_multiplier / config.final_logit_softcapping)
    return jnp.take_along_axis(jax.nn.log_softmax(logits)[:, :-1], tokens[:, 1:, None], axis=-1)[..., 0]
