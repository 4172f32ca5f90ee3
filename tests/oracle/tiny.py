"""A tiny random model in the oracle's weight layout: layer 0 sliding, RoPE and bf16, layer 1 full, NoPE and NVFP4."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from .formats import bfloat16
from .quant import quantise_weights

CONFIG: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "moe_hidden_size": 256,
    "moe_intermediate_size": 128,
    "num_local_experts": 6,
    "num_experts_per_tok": 2,
    "routed_scaling_factor": 1.0,
    "rms_norm_eps": 1e-5,
    "post_norm_eps": 1e-8,
    "qk_scale_factor": 1.75,
    "output_multiplier": 0.5,
    "final_logit_softcapping": 20.0,
    "residual_gate_temperature": 0.3,
    "sliding_window": 4,
    "layer_types": ("sliding_attention", "full_attention"),
    "layer_rope_theta": (500000.0, 0.0),
    "activation_format": "nvfp4",
}

_BF16_SHAPES = {
    "self_attn.q_proj.weight": (256, 128),
    "self_attn.k_proj.weight": (128, 128),
    "self_attn.v_proj.weight": (128, 128),
    "self_attn.gate_proj.weight": (256, 128),
    "self_attn.o_proj.weight": (128, 256),
    "input_layernorm.weight": (128,),
    "pre_feedforward_layernorm.weight": (128,),
    "post_feedforward_layernorm.weight": (128,),
    "post_attention_residual_gate.gate": (128,),
    "post_feedforward_residual_gate.gate": (128,),
    "mlp.pre_expert_proj.weight": (256, 128),
    "mlp.pre_expert_norm.weight": (256,),
    "mlp.experts.gate_up_proj": (6, 256, 256),
    "mlp.experts.down_proj": (6, 256, 128),
    "mlp.experts.post_expert_norm.weight": (256,),
    "mlp.post_expert_proj.weight": (128, 256),
}


def random_bf16(rng: np.random.Generator, *shape: int, scale: float = 1.0) -> NDArray:
    """Normal bf16 numbers with the standard deviation ``scale``."""
    return (scale * rng.standard_normal(shape)).astype(np.float32).astype(bfloat16)


def quantised_experts(rng: np.random.Generator, gate_up: NDArray, down: NDArray) -> dict[str, NDArray]:
    """The NVFP4 tensors of bf16 gate_up [E, 2I, M] and down [E, M, I]; gate and up each have their own scale_2."""
    halves = [[quantise_weights(half) for half in np.split(expert, 2)] for expert in gate_up]
    downs = [quantise_weights(expert) for expert in down]
    gate_up_scale = np.array([np.concatenate([sf for _, sf, _ in pair]) for pair in halves])
    return {
        "gate_up_proj": np.array([np.concatenate([packed for packed, _, _ in pair]) for pair in halves]),
        "gate_up_proj_weight_scale": gate_up_scale.view(ml_dtypes.float8_e4m3fn),
        "gate_up_proj_weight_scale_2": np.array([[ws2 for _, _, ws2 in pair] for pair in halves]),
        "gate_up_proj_input_scale": rng.uniform(0.001, 0.002, (len(gate_up), 2)).astype(np.float32),
        "down_proj": np.array([packed for packed, _, _ in downs]),
        "down_proj_weight_scale": np.array([sf for _, sf, _ in downs]).view(ml_dtypes.float8_e4m3fn),
        "down_proj_weight_scale_2": np.array([ws2 for _, _, ws2 in downs]),
        "down_proj_input_scale": rng.uniform(0.001, 0.002, len(down)).astype(np.float32),
    }


def tiny_weights(rng: np.random.Generator) -> dict[str, NDArray]:
    """Random weights for ``CONFIG``, every matrix with rows of norm about one."""
    shapes = {"embed_tokens.weight": (64, 128), "norm.weight": (128,), "lm_head.weight": (64, 128)}
    shapes |= {f"layers.{i}.{name}": shape for i in range(2) for name, shape in _BF16_SHAPES.items()}
    w = {name: random_bf16(rng, *shape, scale=shape[-1] ** -0.5) for name, shape in shapes.items()}
    for i in range(2):
        w[f"layers.{i}.mlp.gate.weight"] = rng.standard_normal((6, 128)).astype(np.float32)
        w[f"layers.{i}.mlp.gate.e_score_correction_bias"] = rng.standard_normal(6).astype(np.float32) / 4
    prefix = "layers.1.mlp.experts."
    packed = quantised_experts(rng, w[f"{prefix}gate_up_proj"], w[f"{prefix}down_proj"])
    return w | {prefix + name: tensor for name, tensor in packed.items()}
