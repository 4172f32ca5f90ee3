"""What a checkpoint holds, what decoding it needs and whether that fits here, without loading a weight.

`muse-jax inspect` prints it. Sizes are those of the arrays that `repack` and `init_state` would make, by their shapes.
"""

import dataclasses
import os
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np

from muse_jax import weights
from muse_jax.config import MuseSparkConfig
from muse_jax.decode import state as decode_state
from muse_jax.decode import weights as decode_weights
from muse_jax.errors import CheckpointError
from muse_jax.mesh import DEVICE_COUNTS, RANKS
from muse_jax.tokenizer import TOKENIZER_FILE, load_tokenizer
from muse_jax.weights.names import E4M3, U8, ParamSpec, nbytes
from muse_jax.weights.repack import decode_shapes

DEFAULT_CAPACITY = 4096
_MEMINFO = Path("/proc/meminfo")


@dataclasses.dataclass(frozen=True)
class Group:
    """Tensors of one kind, as stored."""

    name: str
    tensors: int
    dtypes: tuple[str, ...]
    bytes: int


@dataclasses.dataclass(frozen=True)
class Footprint:
    """Bytes of something that is spread over the ranks, or copied to every device, or partly both."""

    per_rank: int
    per_device: int
    """What every device holds once, however many ranks it has."""

    def on_device(self, ranks: int) -> int:
        """Bytes on a device with so many ranks."""
        return ranks * self.per_rank + self.per_device

    def __add__(self, other: "Footprint") -> "Footprint":
        """Both together."""
        return Footprint(self.per_rank + other.per_rank, self.per_device + other.per_device)


@dataclasses.dataclass(frozen=True)
class DecodeArray:
    """An array of DecodeWeights."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    layers: int | None
    """Layers stacked in it; 0 for the experts of a kind that no layer has (one unused layer of zeros)."""
    size: Footprint
    layer_size: Footprint | None
    """Of one of its layers."""


@dataclasses.dataclass(frozen=True)
class Caches:
    """A DecodeState for `batch` sequences of `capacity` tokens."""

    batch: int
    capacity: int
    """Rounded up as `init_state` does."""
    token_bytes: int
    """Per rank for every token of capacity of one sequence: k and v of the full layers."""
    ring_bytes: int
    """Per rank and sequence, whatever the capacity: k and v of the sliding layers."""
    rope_bytes: int
    """Per device for every token of capacity: the RoPE table."""
    size: Footprint
    """Of all arrays of the state."""


@dataclasses.dataclass(frozen=True)
class Fit:
    """Whether decoding fits so many devices. The programs' own memory (workspaces, temporaries) is not counted."""

    devices: int
    kind: str
    ranks_per_device: int
    available: int
    """Bytes for each device."""
    available_from: str
    """How `available` is known."""
    weights: int
    """Bytes of DecodeWeights on each device."""
    caches: int
    """Bytes of the DecodeState on each device."""
    params: int
    """Bytes on each device of the parameters in the training layout, which `muse_jax.load` keeps for the reference."""
    largest_capacity: int
    """At this batch, without `params`; 0 if the weights alone do not fit."""

    @property
    def left(self) -> int:
        """Bytes left on each device beside weights and caches; negative if they do not fit."""
        return self.available - self.weights - self.caches

    @property
    def fits(self) -> bool:
        """Whether weights and caches fit."""
        return self.left >= 0

    @property
    def fits_with_params(self) -> bool:
        """Whether the parameters in the training layout fit as well, as `muse_jax.load(reference=True)` has it."""
        return self.left >= self.params


@dataclasses.dataclass(frozen=True)
class Inspection:
    """What `inspect_checkpoint` found. The parts that need a usable configuration are None without one."""

    path: Path
    kind: Literal["orbax", "safetensors"]
    config: MuseSparkConfig | None
    groups: tuple[Group, ...]
    arrays: tuple[DecodeArray, ...] | None
    weights: Footprint | None
    """Of DecodeWeights."""
    layer_weights: Mapping[str, Footprint] | None
    """Of one layer in DecodeWeights, by the format of its experts."""
    caches: Caches | None
    fit: Fit | None
    """None also where the devices do not say how much memory they have."""
    problems: tuple[str, ...]
    unread: tuple[str, ...] = ()
    """safetensors files in the folder that are no part of the model."""

    @property
    def tensors(self) -> int:
        """How many, as stored."""
        return sum(group.tensors for group in self.groups)

    @property
    def bytes(self) -> int:
        """Of all tensors as stored."""
        return sum(group.bytes for group in self.groups)

    @property
    def model(self) -> str | None:
        """The configuration in one line."""
        return None if self.config is None else _model(self.config)


def inspect_checkpoint(
    path: "str | os.PathLike[str]", *, devices: int | None = None, batch: int = 1, capacity: int | None = None
) -> Inspection:
    """Looks at a checkpoint folder, ours (Orbax) or Hugging Face's (safetensors), by its headers and metadata alone.

    Where tensors are missing or wrong, the sizes are those of the complete model that config.json describes.

    Args:
        path: the folder.
        devices: 1, 2, 4 or 8, also more than there are: the others are then taken to be like those here. Default: as
            many as `make_mesh()` uses.
        batch: sequences, as for `init_state`.
        capacity: tokens of each, as for `init_state`. Default: 4096, or max_position_embeddings if that is less.

    Raises:
        CheckpointError: neither kind of folder; all other problems are listed in the result.
        ValueError: devices, batch or capacity out of range.
        TypeError: `path` is no path.
    """
    if devices is not None and devices not in DEVICE_COUNTS:
        raise ValueError(f"devices: given {devices!r}, allowed: 1, 2, 4 or 8")
    contents = weights.read_contents(path)
    groups, unread = _groups(contents), contents.unread
    config, problems = contents.config, (*contents.problems, *_tokenizer_problems(contents.folder))
    if config is None:
        return Inspection(contents.folder, contents.kind, None, groups, None, None, None, None, None, problems, unread)
    if capacity is None:
        capacity = min(DEFAULT_CAPACITY, config.max_position_embeddings)
    caches = _caches(config, batch, capacity)
    arrays = _decode_arrays(config)
    size = sum((array.size for array in arrays), Footprint(0, 0))
    fit = _fit(config, devices, size, caches, _params(contents.specs))
    layers = {kind: _layer(arrays, kind) for kind in sorted(set(config.expert_formats))}
    return Inspection(
        contents.folder, contents.kind, config, groups, arrays, size, layers, caches, fit, problems, unread
    )


def _tokenizer_problems(folder: Path) -> tuple[str, ...]:
    """None without a tokenizer: token ids do without."""
    try:
        if (folder / TOKENIZER_FILE).exists():
            load_tokenizer(folder)
    except CheckpointError as error:
        return error.problems
    return ()


def _model(c: MuseSparkConfig) -> str:
    full, sliding = decode_state.layer_kinds(c)
    quantised = c.expert_formats.count("nvfp4")
    activations = f", {'NVFP4' if c.activation_format == 'nvfp4' else 'bf16'} activations" if quantised else ""
    return (
        f"{c.num_hidden_layers} layers ({full} full, {sliding} sliding over {c.sliding_window}), hidden "
        f"{c.hidden_size}, {c.num_attention_heads} query and {c.num_key_value_heads} kv heads of {c.head_dim}, "
        f"{c.num_local_experts} experts of {c.moe_hidden_size} x {c.moe_intermediate_size} ({c.num_experts_per_tok} "
        f"per token; NVFP4 in {quantised} layers{activations}), vocabulary {c.vocab_size}, up to "
        f"{c.max_position_embeddings} positions"
    )


def _groups(contents: weights.Contents) -> tuple[Group, ...]:
    order = (
        "embedding", "attention", "router", "experts bf16", "experts NVFP4", "expert projections", "norms, gates",
        "head", "unexpected", "other models' parts",
    )  # fmt: skip
    found: dict[str, list[Any]] = {name: [] for name in order}
    for name, tensor in contents.tensors.items():
        found[_group(name, tensor)].append(tensor)
    found[order[-1]] += contents.passed_over.values()
    return tuple(
        Group(name, len(tensors), _dtypes(tensors), sum(nbytes(t.shape, t.dtype) for t in tensors))
        for name, tensors in found.items()
        if tensors
    )


def _dtypes(tensors: list[Any]) -> tuple[str, ...]:
    """Most bytes first."""
    sizes: Counter[str] = Counter()
    for tensor in tensors:
        sizes[np.dtype(tensor.dtype).name] += nbytes(tensor.shape, tensor.dtype)
    return tuple(name for name, _ in sizes.most_common())


def _group(name: str, tensor: Any) -> str:
    leaf = name.partition(".mlp.")[2]
    if name == "embed_tokens.weight":
        return "embedding"
    if name == "lm_head.weight":
        return "head"
    if ".self_attn." in name:
        return "attention"
    if name.endswith(("norm.weight", "residual_gate.gate")):
        return "norms, gates"
    if leaf.startswith("gate."):
        return "router"
    if leaf in ("pre_expert_proj.weight", "post_expert_proj.weight"):
        return "expert projections"
    if leaf.startswith("experts."):
        packed = np.dtype(tensor.dtype) in (U8, E4M3) or name.endswith(("_scale", "_scale_2"))
        return "experts NVFP4" if packed else "experts bf16"
    return "unexpected"


def _params(specs: Mapping[str, ParamSpec]) -> Footprint:
    """Of the parameters in the training layout."""
    spread = sum(spec.nbytes for spec in specs.values() if spec.placement == "expert")
    return Footprint(spread // RANKS, sum(spec.nbytes for spec in specs.values()) - spread)


def _footprint(shape: Any, spec: jax.sharding.PartitionSpec) -> Footprint:
    size = nbytes(shape.shape, shape.dtype)
    return Footprint(size // RANKS, 0) if spec == decode_weights.RANK else Footprint(0, size)


def _decode_arrays(config: MuseSparkConfig) -> tuple[DecodeArray, ...]:
    layers = dict.fromkeys(decode_weights.SPECS, config.num_hidden_layers)
    for kind, suffix in (("bf16", "_bf16"), ("nvfp4", "_fp4")):
        layers |= dict.fromkeys(("w13" + suffix, "w2" + suffix), config.expert_formats.count(kind))
    for name in ("embed", "lm_head", "final_gain", "ranks"):
        del layers[name]
    result = []
    for name, shape in decode_shapes(config).items():
        size, stacked = _footprint(shape, decode_weights.SPECS[name]), layers.get(name)
        one = Footprint(size.per_rank // stacked, size.per_device // stacked) if stacked else None
        result.append(DecodeArray(name, np.dtype(shape.dtype).name, shape.shape, stacked, size, one))
    return tuple(result)


def _layer(arrays: tuple[DecodeArray, ...], kind: str) -> Footprint:
    """Of a layer whose experts have this format."""
    other = "_fp4" if kind == "bf16" else "_bf16"
    sizes = [a.layer_size for a in arrays if a.layer_size is not None and not a.name.endswith(other)]
    return sum(sizes, Footprint(0, 0))


def _caches(config: MuseSparkConfig, batch: int, capacity: int) -> Caches:
    shapes = decode_state.state_shapes(config, batch=batch, capacity=capacity)
    sizes = {name: _footprint(shape, decode_state.SPECS[name]) for name, shape in shapes.items()}
    capacity = shapes["rope"].shape[0]
    return Caches(
        batch, capacity,
        token_bytes=(sizes["k_full"] + sizes["v_full"]).per_rank // (batch * capacity),
        ring_bytes=(sizes["k_ring"] + sizes["v_ring"]).per_rank // batch,
        rope_bytes=sizes["rope"].per_device // capacity,
        size=sum(sizes.values(), Footprint(0, 0)),
    )  # fmt: skip


def _fit(
    config: MuseSparkConfig, devices: int | None, size: Footprint, caches: Caches, params: Footprint
) -> Fit | None:
    here = jax.devices()
    if devices is None:
        devices = next(count for count in DEVICE_COUNTS if count <= len(here))
    ranks = RANKS // devices
    if (memory := _available(here[:devices], devices)) is None:
        return None
    available, source = memory
    token = ranks * caches.batch * caches.token_bytes + caches.rope_bytes
    room = available - size.on_device(ranks) - (caches.size.on_device(ranks) - caches.capacity * token)
    largest = max(room // token, 0) // decode_state.BLOCK * decode_state.BLOCK
    return Fit(
        devices, here[0].device_kind, ranks, available, source,
        weights=size.on_device(ranks),
        caches=caches.size.on_device(ranks),
        params=params.on_device(ranks),
        largest_capacity=min(largest, config.max_position_embeddings),
    )  # fmt: skip


def _available(here: list[Any], devices: int) -> tuple[int, str] | None:
    """(bytes for each of so many devices like these, where the number comes from); None where they do not say."""
    if here[0].platform == "cpu":
        total, source = _machine_memory()
        return total // devices, source if devices == 1 else f"{source}, shared by {devices} CPU devices"
    stats = [device.memory_stats() or {} for device in here]
    if not all("bytes_limit" in s for s in stats):
        return None
    source = "JAX's limit on each device less what is in use"
    if len(here) < devices:
        source += f"; {len(here)} here, the others taken as alike"
    return min(s["bytes_limit"] - s.get("bytes_in_use", 0) for s in stats), source


def _machine_memory() -> tuple[int, str]:
    if _MEMINFO.is_file():
        for line in _MEMINFO.read_text(encoding="ascii").splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024, "this machine's available memory"
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), "this machine's memory, whether free or not"
