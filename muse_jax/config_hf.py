"""Hugging Face's config.json <-> the field values of MuseSparkConfig.

Reading refuses, by name, every setting that would make a different model. Works on dicts and makes no config objects.
"""

import fnmatch
import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from muse_jax.config_checks import as_path, shorten
from muse_jax.errors import ConfigError

CONFIG_FILE = "config.json"
EXTRA = "muse_jax"  # key of what Hugging Face has no name for

_QUANT = "quantization_config"
_DEFAULT_THETA = 500000.0
_MAX_LAYERS = 10000  # a corrupt layer count must not make us build a list of that length

# Without these a model of another size or scale would be built silently.
_REQUIRED = (
    "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
    "moe_hidden_size", "moe_intermediate_size", "num_local_experts", "num_experts_per_tok",
    "qk_scale_factor", "output_multiplier",
)  # fmt: skip
# What Hugging Face's class fills in when the key is absent.
_OPTIONAL = {
    "head_dim": 64, "routed_scaling_factor": 1.0, "rms_norm_eps": 1e-5, "post_norm_eps": 1e-8,
    "final_logit_softcapping": 20.0, "residual_gate_temperature": 0.3, "sliding_window": 2048,
    "max_position_embeddings": 1048576, "bos_token_id": 200000, "pad_token_id": None,
}  # fmt: skip
_MODEL_TYPES = ("muse_spark", "muse_spark_text")
# The release's configuration names only the end of text; its chat turns end with <|eot|>.
_RELEASED_EOS, _RELEASED_EOT = 200001, 200008


def layer_pattern(layers: int, theta: float) -> tuple[tuple[Any, ...], tuple[float, ...]]:
    """(layer_types, layer_rope_theta): counted from the last layer, every fourth is full attention without RoPE."""
    full = [(layers - 1 - i) % 4 == 0 for i in range(layers)]
    types = tuple("full_attention" if f else "sliding_attention" for f in full)
    return types, tuple(0.0 if f else theta for f in full)


def default_expert_formats(layers: int) -> tuple[Any, ...]:
    """NVFP4 everywhere but in the first and the last layer."""
    return tuple("bf16" if i in (0, layers - 1) else "nvfp4" for i in range(layers))


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file; a ConfigError says why there is none."""
    try:
        if path.is_fifo():
            raise OSError("a pipe, which may never end")
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        reason = error.strerror or str(error)
        raise ConfigError(f"cannot read {path}", [f"{reason}; check the path and its permissions"]) from error
    except (ValueError, RecursionError) as error:  # JSON and UTF-8 errors are ValueErrors
        raise ConfigError(f"cannot read {path}", [f"not valid JSON ({error}); download the file again"]) from error
    if not isinstance(data, dict):
        raise ConfigError(f"cannot read {path}", [f"holds a {type(data).__name__}, expected a JSON object"])
    return data


def read_folder(path: "str | os.PathLike[str]") -> dict[str, Any]:
    """config.json at `path` (the file or its folder), merged with the files beside it that complete it."""
    file = as_path("source", path)
    if file.is_dir():
        file = file / CONFIG_FILE
    data = read_json(file)
    if _QUANT not in data and (file.parent / "hf_quant_config.json").is_file():
        data[_QUANT] = read_json(file.parent / "hf_quant_config.json")
    if EXTRA not in data and (file.parent / "generation_config.json").is_file():
        eos = read_json(file.parent / "generation_config.json").get("eos_token_id")
        if eos is not None:
            data["eos_token_id"] = eos
    return data


def from_hf(data: Mapping[str, Any]) -> tuple[dict[str, Any] | None, list[str]]:
    """Field values for MuseSparkConfig (None when too little is known to build one) and the problems found."""
    text = data.get("text_config", data)
    if not isinstance(text, Mapping):
        return None, [f"text_config: given {shorten(text)}, expected an object with the decoder's settings"]
    problems = [*_unsupported(data, text)]
    missing = [name for name in _REQUIRED if text.get(name) is None]
    problems += [f"{name}: missing; every Muse Spark config.json has it" for name in missing]
    if missing:
        return None, problems

    values = {name: text[name] for name in _REQUIRED}
    for name, default in _OPTIONAL.items():
        found = text.get(name)
        values[name] = default if found is None else found
    layers = values["num_hidden_layers"]
    if isinstance(layers, bool) or not isinstance(layers, int) or not 1 <= layers <= _MAX_LAYERS:
        problems.append(f"num_hidden_layers: given {shorten(layers)}, allowed: an integer from 1 to {_MAX_LAYERS}")
        return None, problems

    extra = data.get(EXTRA)
    if extra is not None and not isinstance(extra, Mapping):
        problems.append(f"{EXTRA}: given {shorten(extra)}, expected an object")
        extra = None
    values |= _layer_lists(text, layers, problems)
    values["eos_token_ids"] = _eos(data, text, ours=extra is not None)
    formats, quant_problems = _expert_formats(data.get(_QUANT, text.get(_QUANT)), layers)
    problems += quant_problems
    extra = extra or {}
    values["expert_formats"] = extra.get("expert_formats", formats)
    values["activation_format"] = extra.get("activation_format", "nvfp4")
    return values, problems


def _unsupported(data: Mapping[str, Any], text: Mapping[str, Any]) -> list[str]:
    """Settings that select a model, or a detail of one, that this library does not implement."""
    problems = []

    def refuse(name: str, allowed: str, hint: str = "") -> None:
        given = text.get(name, data.get(name))
        problems.append(f"{name}: given {shorten(given)}, supported: {allowed}" + (f"; {hint}" if hint else ""))

    for where in (data, text):
        if where.get("model_type") not in (None, *_MODEL_TYPES):
            problems.append(
                f"model_type: given {shorten(where['model_type'])}, supported: {' or '.join(map(repr, _MODEL_TYPES))}"
                "; this is another model's configuration"
            )
            break
    mlp = text.get("mlp_layer_types")
    if isinstance(mlp, list | tuple):
        mlp = {i: kind for i, kind in enumerate(mlp) if kind != "sparse"} or None
    if mlp is not None:
        problems.append(
            f"mlp_layer_types: given {shorten(mlp)}, supported: 'sparse' in every layer; dense MLP layers are not "
            "implemented"
        )
    if text.get("num_shared_experts") not in (None, 0):
        refuse("num_shared_experts", "0", "shared experts are not implemented")
    if text.get("attention_bias") not in (None, False):
        refuse("attention_bias", "false", "no projection has a bias")
    if text.get("hidden_act") not in (None, "silu"):
        refuse("hidden_act", "'silu'")
    if text.get("tie_word_embeddings", data.get("tie_word_embeddings")) not in (None, False):
        refuse("tie_word_embeddings", "false", "untie: store the embedding again as lm_head.weight")
    if text.get("rope_scaling") is not None:
        refuse("rope_scaling", "null", "scaled RoPE is not implemented")
    rope = text.get("rope_parameters")
    if rope is not None:
        if not isinstance(rope, Mapping):
            refuse("rope_parameters", "an object with rope_type and rope_theta")
        elif rope.get("rope_type") not in (None, "default"):
            refuse("rope_parameters", "rope_type 'default'", "scaled RoPE is not implemented")
    for where in (text, rope if isinstance(rope, Mapping) else {}):
        if where.get("partial_rotary_factor") not in (None, 1, 1.0):
            problems.append(
                f"partial_rotary_factor: given {shorten(where['partial_rotary_factor'])}, supported: 1.0"
                "; all 64 dimensions of a head rotate"
            )
    return problems


def _layer_lists(text: Mapping[str, Any], layers: int, problems: list[str]) -> dict[str, Any]:
    rope = text.get("rope_parameters")
    table = rope.get("rope_theta") if isinstance(rope, Mapping) else None
    if table is None:
        table = text.get("rope_theta")
    types, thetas = layer_pattern(layers, _DEFAULT_THETA if table is None else table)
    found = text.get("layer_rope_theta")
    if isinstance(found, list | tuple) and table is not None:
        # Implementations disagree on which of the two counts, so a difference has no one meaning.
        others = [theta for theta in found if theta not in (0, table)]
        if others:
            problems.append(
                f"layer_rope_theta: given {shorten(others[0])} where rope_parameters.rope_theta is {shorten(table)}, "
                "allowed: 0 or that value; make the two agree"
            )
    return {
        "layer_types": types if text.get("layer_types") is None else text["layer_types"],
        "layer_rope_theta": thetas if found is None else found,
    }


def _eos(data: Mapping[str, Any], text: Mapping[str, Any], ours: bool) -> Any:
    eos = data.get("eos_token_id")
    if eos is None:
        eos = text.get("eos_token_id")
    if eos is None:
        return ()
    if not isinstance(eos, list | tuple):
        eos = (eos,)
    if not ours and tuple(eos) == (_RELEASED_EOS,):
        return (_RELEASED_EOS, _RELEASED_EOT)
    return tuple(eos)


def _expert_formats(section: Any, layers: int) -> tuple[tuple[Any, ...], list[str]]:
    """Formats by the quantisation section: flat as in config.json, or nested as in hf_quant_config.json."""
    bf16 = ("bf16",) * layers
    if section is None:
        return bf16, []
    if isinstance(section, Mapping) and isinstance(section.get("quantization"), Mapping):
        section = section["quantization"]
    if not isinstance(section, Mapping):
        return bf16, [f"{_QUANT}: given {shorten(section)}, expected an object"]
    problems = []
    method, algorithm = section.get("quant_method"), section.get("quant_algo")
    if method not in (None, "modelopt", "modelopt_fp4"):
        problems.append(
            f"{_QUANT}.quant_method: given {shorten(method)}, supported: 'modelopt'; other exporters store reciprocal "
            "scales under other names"
        )
    elif algorithm != "NVFP4":
        problems.append(
            f"{_QUANT}.quant_algo: given {shorten(algorithm)}, supported: 'NVFP4'; or use the bf16 checkpoint"
        )
    if section.get("group_size") not in (None, 16):
        problems.append(f"{_QUANT}.group_size: given {shorten(section['group_size'])}, supported: 16")
    patterns: list[str] = []
    for key in ("ignore", "exclude_modules"):
        listed = section.get(key)
        if listed is None:
            continue
        if isinstance(listed, list | tuple) and all(isinstance(p, str) for p in listed):
            patterns += listed
        else:
            problems.append(f"{_QUANT}.{key}: given {shorten(listed)}, expected a list of module names")
    if problems:
        return bf16, problems
    excluded = [_is_excluded(i, patterns) for i in range(layers)]
    if not any(excluded):
        return default_expert_formats(layers), []
    return tuple("bf16" if e else "nvfp4" for e in excluded), []


def _is_excluded(layer: int, patterns: list[str]) -> bool:
    """Whether a pattern (module name, its parent, wildcard or "re:" expression) covers the layer's experts."""
    tail = f"layers.{layer}.mlp.experts"
    names = [
        prefix + tail + leaf
        for prefix in ("model.language_model.", "language_model.model.", "language_model.", "model.", "")
        for leaf in ("", ".gate_up_proj", ".down_proj")
    ]
    for pattern in patterns:
        if pattern.startswith("re:"):
            try:
                if any(re.match(pattern[3:], name) for name in names):
                    return True
            except re.error:
                continue  # says nothing about this layer; the weights' dtypes will
        elif any(c in pattern for c in "*?["):
            if any(fnmatch.fnmatchcase(name, pattern) for name in names):
                return True
        elif any(name == pattern or name.startswith(pattern + ".") for name in names):
            return True
    return False


def to_hf(values: Mapping[str, Any]) -> dict[str, Any]:
    """The nested dict that Hugging Face writes for these field values, plus our own section."""
    layers = values["num_hidden_layers"]
    theta = max(values["layer_rope_theta"]) or _DEFAULT_THETA
    eos = list(values["eos_token_ids"])
    text = {
        "model_type": "muse_spark_text",
        **{name: values[name] for name in (*_REQUIRED, *_OPTIONAL)},
        "eos_token_id": eos[0] if len(eos) == 1 else (eos or None),
        "layer_types": list(values["layer_types"]),
        "layer_rope_theta": list(values["layer_rope_theta"]),
        "rope_parameters": {"rope_type": "default", "rope_theta": theta},
        "mlp_layer_types": ["sparse"] * layers,
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "tie_word_embeddings": False,
    }
    return {
        "architectures": ["MuseSparkForConditionalGeneration"],
        "model_type": "muse_spark",
        "dtype": "bfloat16",
        "text_config": text,
        EXTRA: {"expert_formats": list(values["expert_formats"]), "activation_format": values["activation_format"]},
    }


def nvfp4_section(stored: "list[str] | tuple[str, ...]") -> dict[str, Any]:
    """The `quantization_config` of a checkpoint whose layers hold their experts in these formats."""
    ignore = [f"model.language_model.layers.{i}.mlp.experts" for i, kind in enumerate(stored) if kind != "nvfp4"]
    return {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16, "ignore": [*ignore, "lm_head"]}
