"""The one table of parameters: name -> shape, dtype and placement.

Names are Hugging Face's without `model.language_model.`. A layer's experts are stored as "bf16" (plain weights, or the
masters of a layer whose arithmetic is NVFP4) or as "nvfp4" (codes and scales).
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import jax
import ml_dtypes
import numpy as np
from jax.sharding import Mesh, NamedSharding

from muse_jax.config import MuseSparkConfig
from muse_jax.mesh import rank_sharding, replicated

Params = dict[str, jax.Array]
"""Flat parameters: name -> array."""

BF16 = np.dtype(ml_dtypes.bfloat16)
FP32 = np.dtype(np.float32)
E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
U8 = np.dtype(np.uint8)

Placement = Literal["expert", "replicated"]


@dataclasses.dataclass(frozen=True)
class ParamSpec:
    """What one parameter has to be."""

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype
    placement: Placement = "replicated"
    """"expert": the leading axis is spread over the ranks; "replicated": a copy on every device."""

    def sharding(self, mesh: Mesh) -> NamedSharding:
        """How the parameter lies on a mesh."""
        return rank_sharding(mesh) if self.placement == "expert" else replicated(mesh)

    @property
    def nbytes(self) -> int:
        """Bytes of the whole array."""
        return nbytes(self.shape, self.dtype)

    def describe(self) -> str:
        """Dtype and shape, for messages."""
        return describe(self.shape, self.dtype)


def describe(shape: Sequence[int], dtype: Any) -> str:
    """'bfloat16 [16, 512, 128]', for messages."""
    return f"{np.dtype(dtype).name} [{', '.join(map(str, shape))}]"


def nbytes(shape: Sequence[int], dtype: Any) -> int:
    """Bytes of an array."""
    return math.prod(shape) * np.dtype(dtype).itemsize


def parameter_specs(config: MuseSparkConfig, stored: Sequence[str] | None = None) -> dict[str, ParamSpec]:
    """All parameters of a model, in order.

    Args:
        config: the model.
        stored: per layer how its experts are stored, "bf16" or "nvfp4". By default `config.expert_formats`; "bf16" for
            a layer whose arithmetic is NVFP4 means masters.
    """
    stored = config.expert_formats if stored is None else stored
    h, heads = config.hidden_size, config.attention_size
    kv = config.num_key_value_heads * config.head_dim
    m, e = config.moe_hidden_size, config.num_local_experts
    table: list[tuple[str, tuple[int, ...], np.dtype]] = [("embed_tokens.weight", (config.vocab_size, h), BF16)]
    experts: list[tuple[str, tuple[int, ...], np.dtype]] = []
    for i in range(config.num_hidden_layers):
        layer = f"layers.{i}."
        table += [
            (layer + "self_attn.q_proj.weight", (heads, h), BF16),
            (layer + "self_attn.k_proj.weight", (kv, h), BF16),
            (layer + "self_attn.v_proj.weight", (kv, h), BF16),
            (layer + "self_attn.gate_proj.weight", (heads, h), BF16),
            (layer + "self_attn.o_proj.weight", (h, heads), BF16),
            (layer + "input_layernorm.weight", (h,), BF16),
            (layer + "pre_feedforward_layernorm.weight", (h,), BF16),
            (layer + "post_feedforward_layernorm.weight", (h,), BF16),
            (layer + "post_attention_residual_gate.gate", (h,), BF16),
            (layer + "post_feedforward_residual_gate.gate", (h,), BF16),
            (layer + "mlp.gate.weight", (e, h), FP32),
            (layer + "mlp.gate.e_score_correction_bias", (e,), FP32),
            (layer + "mlp.pre_expert_proj.weight", (m, h), BF16),
            (layer + "mlp.pre_expert_norm.weight", (m,), BF16),
            (layer + "mlp.experts.post_expert_norm.weight", (m,), BF16),
            (layer + "mlp.post_expert_proj.weight", (h, m), BF16),
        ]
        experts += _expert_table(config, layer + "mlp.experts.", stored[i])
    table += [("norm.weight", (h,), BF16), ("lm_head.weight", (config.vocab_size, h), BF16)]
    specs = [ParamSpec(*row) for row in table] + [ParamSpec(*row, placement="expert") for row in experts]
    return {spec.name: spec for spec in sorted(specs, key=lambda spec: _order(spec.name))}


def _expert_table(config: MuseSparkConfig, prefix: str, stored: str) -> list[tuple[str, tuple[int, ...], np.dtype]]:
    e, m, i = config.num_local_experts, config.moe_hidden_size, config.moe_intermediate_size
    gate_up, down = prefix + "gate_up_proj", prefix + "down_proj"
    if stored == "bf16":
        return [(gate_up, (e, 2 * i, m), BF16), (down, (e, m, i), BF16)]
    return [
        (gate_up, (e, 2 * i, m // 2), U8),
        (gate_up + "_weight_scale", (e, 2 * i, m // 16), E4M3),
        (gate_up + "_weight_scale_2", (e, 2), FP32),  # column 0 gate, column 1 up
        (gate_up + "_input_scale", (e, 2), FP32),
        (down, (e, m, i // 2), U8),
        (down + "_weight_scale", (e, m, i // 16), E4M3),
        (down + "_weight_scale_2", (e,), FP32),
        (down + "_input_scale", (e,), FP32),
    ]


def _order(name: str) -> tuple[int, int]:
    """Embedding, layers, final norm and head; stable within a layer."""
    if name.startswith("layers."):
        return 1, int(name.split(".")[1])
    return (0, 0) if name.startswith("embed") else (2, 0)


def stored_formats(config: MuseSparkConfig, dtypes: Mapping[str, Any]) -> tuple[str, ...]:
    """Per layer "bf16" or "nvfp4", by the dtype (`dtypes`: name -> dtype) of the experts' weights, never by a name.

    A layer without either expert array counts as what the configuration says; its absence is found elsewhere.
    """
    result = []
    for i, configured in enumerate(config.expert_formats):
        experts = f"layers.{i}.mlp.experts."
        found = dtypes.get(experts + "gate_up_proj", dtypes.get(experts + "down_proj"))
        result.append(configured if found is None else "nvfp4" if np.dtype(found) == U8 else "bf16")
    return tuple(result)


def compare(specs: Mapping[str, ParamSpec], found: Mapping[str, Any], where: Callable[[str], str]) -> list[str]:
    """Problems of arrays (anything with shape and dtype) against the table: missing, unexpected, other shape or dtype.

    `where(name)` says in which file, or under which name, the user finds the array.
    """
    problems = []
    for name, spec in specs.items():
        array = found.get(name)
        if array is None:
            problems.append(f"{where(name)}: missing, expected {spec.describe()}")
        elif tuple(array.shape) != spec.shape or np.dtype(array.dtype) != spec.dtype:
            problems.append(f"{where(name)}: expected {spec.describe()}, found {describe(array.shape, array.dtype)}")
    for name, array in found.items():
        if name not in specs:
            problems.append(f"{where(name)}: unexpected, found {describe(array.shape, array.dtype)}")
    return problems


def check_params(config: MuseSparkConfig, params: Mapping[str, Any]) -> tuple[dict[str, ParamSpec], list[str]]:
    """(specs of how these parameters are stored, problems)."""
    stored = stored_formats(config, {name: array.dtype for name, array in params.items()})
    specs = parameter_specs(config, stored)
    problems = compare(specs, params, lambda name: name)
    for i, (configured, found) in enumerate(zip(config.expert_formats, stored, strict=True)):
        if configured == "bf16" and found == "nvfp4":
            problems.append(
                f"layers.{i}.mlp.experts: NVFP4 weights, but expert_formats[{i}] is 'bf16'; set it to 'nvfp4'"
            )
    return specs, problems


def place(spec: ParamSpec, array: np.ndarray, mesh: Mesh) -> jax.Array:
    """Host array [spec.shape] -> device array with the parameter's sharding. The array must not change afterwards."""
    return jax.make_array_from_callback(spec.shape, spec.sharding(mesh), lambda index: array[index])
