"""Where another implementation starts to differ from training, layer by layer, and the fused decode does not.

    python examples/logprobs_vs_training.py [CHECKPOINT] [--plot differences.png]

The other implementation is `plain` below: the same model in jax.numpy, rounded to bf16 and NVFP4 in the same places,
but added up in the order that XLA likes. No line of it is wrong, and still a sampler that is built like it has other
log-probabilities than its trainer: a last bit becomes another NVFP4 code or another expert two layers later. Without a
checkpoint it is the tiny model with random weights.
"""

import argparse
import sys
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from matplotlib.figure import Figure

import muse_jax
from muse_jax import ops
from muse_jax.decoded import decode_text
from muse_jax.tokenizer import byte_tokenizer
from muse_jax.weights import random_params, stored_formats

TEXT = "def rollout(weights, state, token):\n    return step(state, token)\n"
BF16 = jnp.bfloat16
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)


def wide(x: jax.Array) -> jax.Array:
    """To fp32, in which everything is added up."""
    return x.astype(jnp.float32)


def linear(x: jax.Array, w: jax.Array) -> jax.Array:
    """bf16 [T, K], bf16 [N, K] -> fp32 [T, N]."""
    return jnp.einsum("tk,nk->tn", x, w, preferred_element_type=jnp.float32)


def norm(x: jax.Array, eps: float, gain: jax.Array | None = None) -> jax.Array:
    """RMS norm over the last dimension -> bf16; the gain is zero-centred."""
    y = wide(x) * jax.lax.rsqrt(jnp.mean(wide(x) ** 2, axis=-1, keepdims=True) + eps)
    return (y if gain is None else y * wide((1 + wide(gain)).astype(BF16))).astype(BF16)


def scaled_norm(y: jax.Array, eps: float, gain: jax.Array) -> jax.Array:
    """The norm behind the MoE, bf16 -> bf16: the gain comes first."""
    return norm((wide(y) * wide((1 + wide(gain)).astype(BF16))).astype(BF16), eps)


def unpack(codes: jax.Array, scales: jax.Array) -> jax.Array:
    """NVFP4 codes uint8 [..., K/2] and scales [..., K/16] -> fp32 [..., K]."""
    nibbles = jnp.stack([codes & 15, codes >> 4], axis=-1).reshape(*scales.shape, 16)
    return (jnp.asarray(E2M1)[nibbles.astype(jnp.int32)] * wide(scales)[..., None]).reshape(*codes.shape[:-1], -1)


def attention(config: muse_jax.MuseSparkConfig, i: int, w: Mapping[str, jax.Array], h: jax.Array) -> jax.Array:
    """The branch of layer `i`, bf16 [T, H] -> bf16 [T, H]."""
    length = len(h)
    q, k, v, u = (linear(h, w[f"self_attn.{name}_proj.weight"]).astype(BF16) for name in ("q", "k", "v", "gate"))
    q, k, v = (x.reshape(length, -1, 64) for x in (q, k, v))
    q, k = norm(q, config.rms_norm_eps), norm(k, config.rms_norm_eps)
    if config.layer_rope_theta[i]:
        cos, sin = jnp.split(jnp.asarray(ops.rope_table(length, config.rope_theta))[:, None], 2, axis=-1)
        q, k = (rotate(x, cos, sin) for x in (q, k))
    k, v = (jnp.repeat(x, q.shape[1] // x.shape[1], axis=1) for x in (k, v))
    score = jnp.einsum("qnd,knd->nqk", q, k, preferred_element_type=jnp.float32) * (config.qk_scale_factor / 8)
    distance = np.arange(length)[:, None] - np.arange(length)
    window = config.sliding_window if config.layer_types[i] == "sliding_attention" else length
    p = jnp.where((distance >= 0) & (distance < window), jnp.exp(score), 0).astype(BF16)
    summed = jnp.einsum("nqk,knd->qnd", p, v, preferred_element_type=jnp.float32)
    a = (summed / wide(p).sum(axis=-1).T[..., None]).astype(BF16)
    a = wide(a) * jax.lax.rsqrt(jnp.mean(wide(a) ** 2, axis=-1, keepdims=True) + config.rms_norm_eps)
    o = (a.reshape(length, -1) * jax.nn.sigmoid(wide(u))).astype(BF16)
    return norm(linear(o, w["self_attn.o_proj.weight"]).astype(BF16), config.post_norm_eps)


def rotate(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """RoPE of adjacent pairs, bf16 [T, heads, 64]."""
    a, b = wide(x[..., 0::2]), wide(x[..., 1::2])
    return jnp.stack([a * cos - b * sin, a * sin + b * cos], axis=-1).reshape(x.shape).astype(BF16)


def moe(config: muse_jax.MuseSparkConfig, i: int, w: Mapping[str, jax.Array], h: jax.Array) -> jax.Array:
    """The branch of layer `i` up to its last norm, bf16 [T, H] -> bf16 [T, H]; every expert sees every row."""
    p = jax.nn.sigmoid(linear(wide(h), w["mlp.gate.weight"]) * config.output_multiplier)
    _, chosen = jax.lax.top_k(p + w["mlp.gate.e_score_correction_bias"], config.num_experts_per_tok)
    p = jnp.take_along_axis(p, chosen, axis=1)
    weights = p / (p.sum(axis=1, keepdims=True) + 1e-15) * config.routed_scaling_factor
    e = norm(
        linear(h, w["mlp.pre_expert_proj.weight"]).astype(BF16), config.rms_norm_eps, w["mlp.pre_expert_norm.weight"]
    )

    def seen(x: jax.Array, name: str) -> tuple[jax.Array, jax.Array]:
        """Rows and weights as this layer's products see them, fp32."""
        codes = w[f"mlp.experts.{name}"]
        if config.expert_formats[i] == "bf16":
            return wide(x), wide(codes)
        scale_2 = w[f"mlp.experts.{name}_weight_scale_2"].reshape(len(codes), -1)
        scale_2 = jnp.repeat(scale_2, codes.shape[1] // scale_2.shape[1], axis=1)[..., None]
        if config.activation_format == "nvfp4":
            scale = jnp.max(w[f"mlp.experts.{name}_input_scale"])
            x = unpack(*ops.quantize(x, scale)) * scale
        return wide(x), unpack(codes, w[f"mlp.experts.{name}_weight_scale"]) * scale_2

    gate, up = jnp.split(jnp.einsum("tm,enm->ten", *seen(e, "gate_up_proj")), 2, axis=-1)
    f = jnp.einsum("ten,emn->tem", *seen((jax.nn.silu(gate) * up).astype(BF16), "down_proj")).astype(BF16)
    z = wide(jnp.take_along_axis(f, chosen[..., None], axis=1))
    z = z * wide((1 + wide(w["mlp.experts.post_expert_norm.weight"])).astype(BF16))
    z = z * jax.lax.rsqrt(jnp.mean(z * z, axis=-1, keepdims=True) + config.post_norm_eps)
    x = jnp.einsum("tk,tkm->tm", weights, z).astype(BF16)
    return linear(x, w["mlp.post_expert_proj.weight"]).astype(BF16)


def residual(config: muse_jax.MuseSparkConfig, s: jax.Array, n: jax.Array, gate: jax.Array) -> jax.Array:
    """The stream fp32 [T, H] after a branch bf16 [T, H]."""
    beta = jax.nn.sigmoid(wide(gate) / config.residual_gate_temperature)
    return jnp.sqrt(jnp.maximum(1 - beta * beta, 1e-3)) * s + beta * wide(n)


def plain(config: muse_jax.MuseSparkConfig, params: Mapping[str, jax.Array], ids: jax.Array) -> dict[str, jax.Array]:
    """Streams fp32 [T, H] by tap, and log-probabilities fp32 [T - 1] of the tokens after the first."""
    eps, taps = config.rms_norm_eps, {}
    s = wide(norm(params["embed_tokens.weight"][ids], eps))
    for i in range(config.num_hidden_layers):
        prefix = f"layers.{i}."
        w = {name.removeprefix(prefix): array for name, array in params.items() if name.startswith(prefix)}
        n = attention(config, i, w, norm(s, eps, w["input_layernorm.weight"]))
        taps[prefix + "post_attention_residual"] = s = residual(config, s, n, w["post_attention_residual_gate.gate"])
        y = moe(config, i, w, norm(s, eps, w["pre_feedforward_layernorm.weight"]))
        n = scaled_norm(y, config.post_norm_eps, w["post_feedforward_layernorm.weight"])
        s = residual(config, s, n, w["post_feedforward_residual_gate.gate"])
        taps[prefix + "post_feedforward_residual"] = s
    x = wide(s.astype(BF16))
    x = x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + eps)
    z = linear((x * wide(params["norm.weight"])).astype(BF16), params["lm_head.weight"])
    logits = config.final_logit_softcapping * jnp.tanh(z * config.output_multiplier / config.final_logit_softcapping)
    log_probs = jax.nn.log_softmax(logits)[:-1]
    return taps | {"log-probabilities": jnp.take_along_axis(log_probs, ids[1:, None], axis=1)[:, 0]}


def draw(path: str, names: list[str], theirs: list[float], ours: list[float]) -> None:
    """A PNG: each tap's difference from the reference, of its root mean square."""
    figure = Figure(figsize=(9, 4), layout="constrained")
    axes = figure.subplots()
    axes.plot(theirs, "o-", label="plain XLA ops, the same roundings")
    axes.plot(ours, "s-", label="fused decode step")
    axes.set_yscale("symlog", linthresh=1e-8)
    axes.set_xticks(range(len(names)), names, rotation=90, fontsize=7)
    axes.set_ylabel("rms of the difference / rms")
    axes.set_title("difference from the training forward")
    axes.legend()
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=150)


def main() -> None:
    """Compares both with the reference on a text; exit code 1 if the fused step differs in one byte."""
    parser = argparse.ArgumentParser(description="Where another implementation starts to differ from training.")
    parser.add_argument("checkpoint", nargs="?", help="folder, NVFP4 layers as codes")
    parser.add_argument("--plot", default="differences.png", help="PNG to write")
    args = parser.parse_args()
    mesh = muse_jax.make_mesh()
    if args.checkpoint is not None:
        model = muse_jax.load(args.checkpoint, mesh=mesh)
    else:
        config = muse_jax.MuseSparkConfig.tiny()
        params = random_params(config, 0, mesh, quantized=True)
        model = muse_jax.LanguageModel(config, params, mesh, byte_tokenizer())
    if model.tokenizer is None:
        sys.exit("this checkpoint has no tokenizer; copy its tokenizer.json into the folder")
    formats = stored_formats(model.config, {name: w.dtype for name, w in model.params.items()})
    if formats != model.config.expert_formats:
        sys.exit("this checkpoint has bf16 masters in NVFP4 layers; quantise it with muse-jax convert --quantize")
    ids = model.tokenizer.encode(TEXT).ids

    # Three ways to the same numbers: the decode step, the training forward, and plain XLA.
    tokens = jnp.asarray(ids)
    decoded: dict[str, Any] = dict(decode_text(model, ids).taps)
    training: dict[str, Any] = {name: np.asarray(x)[0] for name, x in model.reference_taps(tokens[None]).items()}
    for taps in (decoded, training):
        taps["log-probabilities"] = np.asarray(ops.log_prob(jnp.asarray(taps["logits"])[:-1], tokens[1:]))
    params = {name: jnp.asarray(np.asarray(w)) for name, w in model.params.items()}  # one device, no collectives
    # Without the option XLA leaves out roundings where it can.
    run = jax.jit(plain, static_argnums=0, compiler_options={"xla_allow_excess_precision": False})
    other = {name: np.asarray(x) for name, x in run(model.config, params, tokens).items()}

    print(f"{'difference from the training forward':37} {'fused step':>12} {'plain XLA':>12} {'of its numbers':>15}")
    curves = []
    for name, theirs in other.items():
        want = training[name]
        ours_rms, theirs_rms = (
            float(np.sqrt(np.mean((x - want) ** 2) / np.mean(want**2))) for x in (decoded[name], theirs)
        )
        curves.append((name, theirs_rms, ours_rms))
        print(f"{name:37} {ours_rms:12.3g} {theirs_rms:12.3g} {np.mean(theirs != want):14.1%}")
    worst = [float(np.abs(x["log-probabilities"] - training["log-probabilities"]).max()) for x in (decoded, other)]
    print(f"max |log-probability - training's|: fused step {worst[0]}, plain XLA {worst[1]:.3g}")
    differing = sum(decoded[name].tobytes() != training[name].tobytes() for name in other)
    print(f"taps of the fused step that differ from training in a byte: {differing} of {len(other)}")
    draw(args.plot, *map(list, zip(*curves, strict=True)))
    sys.exit(differing > 0)


if __name__ == "__main__":
    main()
