"""New parameters into a decode layout that is there already: on the devices, in place, any subset of names.

One layer at a time, so that nothing but that layer's new arrays lies beside the decode layout.
"""

import dataclasses
import difflib
import functools
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer
from jax.sharding import Mesh

from muse_jax.config import MuseSparkConfig
from muse_jax.decode.weights import REPLICATED, SPECS, DecodeWeights
from muse_jax.weights.names import U8, Params, ParamSpec, compare, parameter_specs, stored_formats
from muse_jax.weights.repack import PANEL_BYTES, PANEL_CODES, TILE, bits, decode_shardings, pack_ends, pack_layers

ENDS = {"embed_tokens.weight": "embed", "norm.weight": "final_gain", "lm_head.weight": "lm_head"}
"""Parameters outside the layers, and the whole decode array that each makes."""
EXPERTS = {"bf16": ("w13_bf16", "w2_bf16"), "nvfp4": ("w13_fp4", "w2_fp4")}
"""Decode arrays of each format, stacked over the layers of that format alone."""


class Place(NamedTuple):
    """What a parameter of a layer makes of a decode array: all that the layer has, or a part along one axis."""

    array: str
    axis: int | None = None
    start: int = 0
    stop: int = 0


def refit(weights: DecodeWeights, params: Mapping[str, jax.Array]) -> Iterator[DecodeWeights]:
    """Writes parameters into packed weights, layer by layer; the bytes are `repack`'s, and no program is compiled anew.

    Args:
        weights: consumed: the arrays that change are donated.
        params: some or all parameters by name, as `check_update` wants them; they stay as they are.

    Yields:
        The weights after each layer. Only the latest have all their arrays.
    """
    for layer, own in by_layer(params):
        arrays = {name: getattr(weights, name) for name in SPECS}
        weights = dataclasses.replace(weights, **write(weights.config, weights.mesh, arrays, own, layer))
        yield weights
        jax.block_until_ready(weights)  # one layer's temporaries at a time


def check_update(config: MuseSparkConfig, mesh: Mesh, params: Mapping[str, Any]) -> list[str]:
    """What keeps these parameters from being written: names, shapes, dtypes, and how they lie on the mesh.

    A layer whose arithmetic is NVFP4 takes codes and scales, any of them, or both of its bf16 masters.
    """
    arrays = {name: x for name, x in params.items() if isinstance(x, jax.Array) and not isinstance(x, Tracer)}
    problems = [
        f"{name}: a value inside a program; call update outside jit"
        if isinstance(x, Tracer)
        else f"{name}: a {type(x).__name__}, expected a jax.Array on the model's mesh"
        for name, x in params.items()
        if name not in arrays
    ]
    stored = stored_formats(config, {name: x.dtype for name, x in arrays.items()})
    specs = parameter_specs(config, stored)
    known = {name: x for name, x in arrays.items() if name in specs}
    problems += compare({name: specs[name] for name in known}, known, lambda name: name)
    for name in arrays.keys() - known.keys():
        near = difflib.get_close_matches(str(name), specs, 1)
        problems.append(f"{name}: no such parameter" + (f"; did you mean {near[0]}?" if near else ""))
    for name, x in known.items():
        wanted = specs[name].sharding(mesh)
        if x.is_deleted():
            problems.append(f"{name}: deleted, because a program that it was donated to consumed it")
        elif x.ndim == len(specs[name].shape) and not x.sharding.is_equivalent_to(wanted, x.ndim):
            problems.append(f"{name}: lies as {x.sharding}, expected {wanted}; move it there with jax.device_put")
    for layer, (configured, found) in enumerate(zip(config.expert_formats, stored, strict=True)):
        experts = f"layers.{layer}.mlp.experts."
        given = [part for part in ("gate_up_proj", "down_proj") if experts + part in arrays]
        if configured == "bf16" and found == "nvfp4":
            problems.append(f"{experts}: NVFP4 weights, but expert_formats[{layer}] is 'bf16'")
        if configured == "nvfp4" and found == "bf16" and len(given) == 1:
            problems.append(f"{experts}{given[0]}: a master alone; give both gate_up_proj and down_proj")
    return sorted(problems)


def merged(config: MuseSparkConfig, old: Mapping[str, jax.Array], new: Mapping[str, jax.Array]) -> Params:
    """The parameters after an update: masters that come in place of codes take their scales away, and the reverse."""
    stored = stored_formats(config, {name: x.dtype for name, x in {**old, **new}.items()})
    return {name: x for name, x in {**old, **new}.items() if name in new or name in parameter_specs(config, stored)}


def write(
    config: MuseSparkConfig, mesh: Mesh, arrays: Mapping[str, jax.Array], params: Params, layer: int | None
) -> dict[str, jax.Array]:
    """Writes some of a layer's parameters, named as layer 0's, or of those outside the layers (None).

    Returns:
        The arrays that changed; what was given of them is consumed.
    """
    program_, operands = program(config, mesh, arrays, params, layer)
    return program_(*operands)


def program(
    config: MuseSparkConfig, mesh: Mesh, arrays: Mapping[str, jax.Array], params: Params, layer: int | None
) -> tuple[Any, tuple[Any, ...]]:
    """The compiled program of `write` and its operands, of which it donates the first."""
    if layer is None:
        return _ends_writer(mesh), ({ENDS[name]: arrays[ENDS[name]] for name in params}, params)
    form = config.expert_formats[layer]
    # Packing knows nothing of attention: one program for each format of experts.
    one = config.replace(
        num_hidden_layers=1, layer_types=("full_attention",), layer_rope_theta=(0.0,), expert_formats=(form,)
    )
    touched = {place.array for name, x in params.items() for place in _places(one, name, x.dtype)}
    index = config.expert_formats[:layer].count(form)
    given = {name: arrays[name] for name in touched}
    return _writer(one, mesh), (given, params, jnp.int32(layer), jnp.int32(index))


def by_layer(params: Mapping[str, jax.Array]) -> Iterable[tuple[int | None, Params]]:
    """The parameters of each layer that has some, named as layer 0's; None: those outside the layers."""
    parts: dict[int | None, Params] = {}
    for name, x in params.items():
        _, *rest = name.split(".", 2)
        layer = int(rest[0]) if name.startswith("layers.") else None
        parts.setdefault(layer, {})[name if layer is None else f"layers.0.{rest[1]}"] = x
    return parts.items()


@functools.lru_cache(maxsize=16)
def _ends_writer(mesh: Mesh):
    @jax.named_scope("muse_update")
    def update(arrays: dict[str, jax.Array], params: Params) -> dict[str, jax.Array]:
        return pack_ends(mesh, params)

    # The new bytes do not depend on the old ones: they are kept as an argument, for their memory.
    return jax.jit(update, donate_argnums=0, keep_unused=True)


@functools.lru_cache(maxsize=16)
def _writer(one: MuseSparkConfig, mesh: Mesh):
    # Not by is_fully_replicated: on one device everything is.
    layer_axis = {name: 0 if spec == REPLICATED else 1 for name, spec in SPECS.items()}

    @jax.named_scope("muse_update")
    def update(
        arrays: dict[str, jax.Array], params: Params, layer: jax.Array, index: jax.Array
    ) -> dict[str, jax.Array]:
        stored = stored_formats(one, {name: x.dtype for name, x in params.items()})
        packed = pack_layers(one, mesh, _filled(parameter_specs(one, stored), params))
        kinds, shardings = EXPERTS[one.expert_formats[0]], decode_shardings(mesh)
        out = {name: bits(x) for name, x in arrays.items()}
        for name, x in params.items():
            for place in _places(one, name, x.dtype):
                new = bits(packed[place.array])
                starts: list[Any] = [jnp.int32(0)] * new.ndim
                starts[layer_axis[place.array]] = index if place.array in kinds else layer
                if place.axis is not None:
                    new = lax.slice_in_dim(new, place.start, place.stop, axis=place.axis)
                    starts[place.axis] = jnp.int32(place.start)
                out[place.array] = lax.dynamic_update_slice(out[place.array], new, starts)
        out = {name: lax.with_sharding_constraint(x, shardings[name]) for name, x in out.items()}
        return {
            name: x if x.dtype == arrays[name].dtype else lax.bitcast_convert_type(x, arrays[name].dtype)
            for name, x in out.items()
        }

    return jax.jit(update, donate_argnums=0)


def _filled(specs: Mapping[str, ParamSpec], params: Params) -> Params:
    """A whole layer, with zeros for what is not given: nothing is made of them that is kept."""
    return {name: params[name] if name in params else jnp.zeros(s.shape, s.dtype) for name, s in specs.items()}


def _places(config: MuseSparkConfig, name: str, dtype: Any) -> list[Place]:
    """Where a parameter of a layer goes."""
    suffix = name.removeprefix("layers.0.")
    heads = config.attention_size // 8 // TILE
    kv = config.num_key_value_heads * config.head_dim // 8 // TILE
    by_name = {
        "self_attn.q_proj.weight": Place("qkvu", 2, 0, heads),
        "self_attn.k_proj.weight": Place("qkvu", 2, heads, heads + kv),
        "self_attn.v_proj.weight": Place("qkvu", 2, heads + kv, heads + 2 * kv),
        "self_attn.gate_proj.weight": Place("qkvu", 2, heads + 2 * kv, 2 * (heads + kv)),
        "self_attn.o_proj.weight": Place("o"),
        "input_layernorm.weight": Place("hidden_gains", 1, 0, 1),
        "pre_feedforward_layernorm.weight": Place("hidden_gains", 1, 1, 2),
        "post_feedforward_layernorm.weight": Place("hidden_gains", 1, 2, 3),
        "post_attention_residual_gate.gate": Place("gates", 1, 0, 2),
        "post_feedforward_residual_gate.gate": Place("gates", 1, 2, 4),
        "mlp.gate.weight": Place("router"),
        "mlp.gate.e_score_correction_bias": Place("router_bias"),
        "mlp.pre_expert_proj.weight": Place("pre_expert"),
        "mlp.pre_expert_norm.weight": Place("moe_gains", 1, 0, 1),
        "mlp.experts.post_expert_norm.weight": Place("moe_gains", 1, 1, 2),
        "mlp.post_expert_proj.weight": Place("post_expert"),
    }
    if suffix in by_name:
        return [by_name[suffix]]
    part = suffix.removeprefix("mlp.experts.")
    up = part.startswith("gate_up_proj")
    scale_2, input_scale = Place("scale_2", 2, 0 if up else 2, 2 if up else 3), Place("input_scales", 1, 1 - up, 2 - up)
    if part.endswith("_input_scale"):
        return [input_scale]
    if part.endswith("_weight_scale_2"):
        return [scale_2]
    weights = EXPERTS[config.expert_formats[0]][1 - up]
    if part.endswith("_weight_scale"):
        return [Place(weights, 6, PANEL_CODES, PANEL_BYTES)]
    if np.dtype(dtype) == U8:
        return [Place(weights, 6, 0, PANEL_CODES)]
    return [Place(weights), scale_2, input_scale]  # bf16, or masters, which bring their scales
