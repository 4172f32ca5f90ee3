"""MuseSparkConfig: every number that defines a model, validated as a whole.

No JAX here: reading a configuration must not start a backend.
"""

import dataclasses
import json
import os
from collections.abc import Mapping
from typing import Any, Literal

from muse_jax import config_checks, config_hf
from muse_jax.errors import ConfigError

LayerType = Literal["full_attention", "sliding_attention"]
ExpertFormat = Literal["bf16", "nvfp4"]
ActivationFormat = Literal["nvfp4", "bf16"]


@dataclasses.dataclass(frozen=True)
class MuseSparkConfig:
    """Sizes and constants of one Muse Spark text decoder. Immutable and hashable.

    Lists given for the tuple fields become tuples and integers given for the float fields become floats.

    Raises:
        ConfigError (a ValueError): one error that lists every field that is wrong, what was given, what is allowed
            and, where it helps, what to do. `.problems` has one string per problem.
    """

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    moe_hidden_size: int
    moe_intermediate_size: int
    num_local_experts: int
    num_experts_per_tok: int
    routed_scaling_factor: float
    rms_norm_eps: float
    post_norm_eps: float
    qk_scale_factor: float
    output_multiplier: float
    final_logit_softcapping: float
    residual_gate_temperature: float
    sliding_window: int
    layer_types: tuple[LayerType, ...]
    layer_rope_theta: tuple[float, ...]
    """RoPE base of each layer, 0 for a layer without positions (NoPE)."""
    max_position_embeddings: int
    bos_token_id: int
    eos_token_ids: tuple[int, ...]
    """Generation stops at any of these; empty means that it never does."""
    pad_token_id: int | None
    expert_formats: tuple[ExpertFormat, ...]
    """Arithmetic of each layer's routed experts; an "nvfp4" layer may hold bf16 masters (docs/architecture.md)."""
    activation_format: ActivationFormat = "nvfp4"
    """Expert inputs of NVFP4 layers: "nvfp4" quantises them (W4A4), "bf16" keeps them (W4A16)."""

    def __post_init__(self) -> None:
        """Normalises the types and validates all fields together."""
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        for name, value in config_checks.normalise(values).items():
            object.__setattr__(self, name, value)
            values[name] = value
        problems = config_checks.find_problems(values)
        if problems:
            raise ConfigError("invalid MuseSparkConfig", problems)

    @property
    def rope_theta(self) -> float:
        """The RoPE base that all layers with positions share; 0.0 when every layer is NoPE."""
        return max(self.layer_rope_theta)

    @property
    def attention_size(self) -> int:
        """Width of the concatenated query heads: num_attention_heads * head_dim."""
        return self.num_attention_heads * self.head_dim

    @classmethod
    def from_hf(cls, source: "Mapping[str, Any] | str | os.PathLike[str]") -> "MuseSparkConfig":
        """Reads a Hugging Face configuration.

        Args:
            source: the parsed config.json (nested with `text_config`, or flat), or the path of config.json or of the
                folder that holds it. With a path, `hf_quant_config.json` and `generation_config.json` (further
                end-of-text tokens) beside it are read too.

        Which layers are NVFP4 comes from the quantisation section's exclude list; one that names no layer's experts,
        or none at all, means "all but the first and the last". The weights' importer looks at the real dtypes.

        Raises:
            ConfigError: lists every missing, unsupported or invalid setting, or why the file cannot be read.
        """
        if not isinstance(source, Mapping):
            source = config_hf.read_folder(source)
        values, problems = config_hf.from_hf(source)
        if values is not None:
            try:
                config = cls(**values)
                if not problems:
                    return config
            except ConfigError as error:
                problems = [*problems, *error.problems]
        raise ConfigError("cannot use this Hugging Face configuration", problems)

    def to_hf(self) -> dict[str, Any]:
        """The configuration as a JSON-ready dict in Hugging Face's nested form.

        `from_hf(to_hf(c)) == c` for every c; what Hugging Face has no name for stands under "muse_jax".
        """
        return config_hf.to_hf({field.name: getattr(self, field.name) for field in dataclasses.fields(self)})

    def to_json(self) -> str:
        """`to_hf()` as the text of a config.json."""
        return json.dumps(self.to_hf(), indent=2, allow_nan=False) + "\n"

    def replace(self, **changes: Any) -> "MuseSparkConfig":
        """A copy with some fields changed, validated again."""
        return dataclasses.replace(self, **changes)

    @classmethod
    def released(cls) -> "MuseSparkConfig":
        """Muse Spark Open 816B-A42B in its NVFP4 release: experts of the first and the last layer stay bf16."""
        layers = 62
        layer_types, layer_rope_theta = config_hf.layer_pattern(layers, 500000.0)
        return cls(
            vocab_size=202048, hidden_size=8192, num_hidden_layers=layers,
            num_attention_heads=128, num_key_value_heads=16, head_dim=64,
            moe_hidden_size=4096, moe_intermediate_size=4096, num_local_experts=256, num_experts_per_tok=8,
            routed_scaling_factor=1.0, rms_norm_eps=1e-5, post_norm_eps=1e-8, qk_scale_factor=5.4730064863875,
            output_multiplier=0.1767766952966369, final_logit_softcapping=20.0, residual_gate_temperature=0.3,
            sliding_window=2048, layer_types=layer_types, layer_rope_theta=layer_rope_theta,
            max_position_embeddings=1048576, bos_token_id=200000, eos_token_ids=(200001, 200008),
            pad_token_id=200018, expert_formats=config_hf.default_expert_formats(layers),
        )  # fmt: skip

    @classmethod
    def tiny(cls) -> "MuseSparkConfig":
        """The released structure in 15 million parameters, with a byte vocabulary: for tests and first steps."""
        layers = 6
        layer_types, layer_rope_theta = config_hf.layer_pattern(layers, 500000.0)
        return cls(
            vocab_size=384, hidden_size=256, num_hidden_layers=layers,
            num_attention_heads=16, num_key_value_heads=8, head_dim=64,
            moe_hidden_size=128, moe_intermediate_size=256, num_local_experts=16, num_experts_per_tok=4,
            routed_scaling_factor=1.0, rms_norm_eps=1e-5, post_norm_eps=1e-8, qk_scale_factor=1.75,
            output_multiplier=1.0, final_logit_softcapping=20.0, residual_gate_temperature=0.3,
            sliding_window=32, layer_types=layer_types, layer_rope_theta=layer_rope_theta,
            max_position_embeddings=4096, bos_token_id=256, eos_token_ids=(257,),
            pad_token_id=258, expert_formats=config_hf.default_expert_formats(layers),
        )  # fmt: skip
