"""A checkpoint straight into the decode layout, layer by layer: the devices never hold the training layout of more than
one layer, which for the release is the difference between eight H200s and more than there are in a host."""

import dataclasses
import functools
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh

from muse_jax.config import MuseSparkConfig
from muse_jax.decode.weights import REPLICATED, SPECS, DecodeWeights
from muse_jax.errors import CheckpointError
from muse_jax.mesh import check_mesh
from muse_jax.weights.checkpoints import open_source
from muse_jax.weights.loading import load_source
from muse_jax.weights.names import Params, ParamSpec
from muse_jax.weights.repack import decode_shapes, decode_shardings, pack_ends, pack_layers, packed_weights
from muse_jax.weights.transfer import Progress, Source

EXPERTS = {"bf16": ("w13_bf16", "w2_bf16"), "nvfp4": ("w13_fp4", "w2_fp4")}
"""Decode arrays of each format, stacked over the layers of that format alone."""
ENDS = ("embed", "final_gain", "lm_head")
"""Decode arrays that have no layers."""


def load_packed(
    path: "str | os.PathLike[str]", mesh: Mesh, *, progress: Progress | None = None
) -> tuple[MuseSparkConfig, Params, DecodeWeights]:
    """Loads a checkpoint folder, ours or Hugging Face's, into the decode layout alone; the bytes are `repack`'s.

    Returns:
        (config, the parameters outside the layers, weights).

    Raises:
        CheckpointError: as `load`; problems of all layers in one error.
    """
    mesh = check_mesh(mesh)
    folder = Path(path)
    headline = f"cannot load {folder}"
    _, source = open_source(folder, None, "load")
    config, total, done = source.config, sum(spec.nbytes for spec in source.specs.values()), 0
    problems: list[str] = []
    ends: Params = {}
    arrays: dict[str, jax.Array] = _zeros(config, mesh)()
    for layer, part in _parts(source):
        report = None if progress is None else functools.partial(_report, progress, done, total)
        params: Params = {}
        try:
            params = load_source(part, mesh, headline, report)
        except CheckpointError as error:
            problems += [problem for problem in error.problems if problem not in problems]
        done += sum(spec.nbytes for spec in part.specs.values())
        if problems:  # look for more problems, but stop filling memory
            continue
        if layer is None:
            ends = params
            arrays |= jax.jit(functools.partial(pack_ends, mesh))(ends)
        else:
            arrays |= _store(config, mesh, arrays, params, layer)
            del params  # before the next layer comes
    if problems:
        raise CheckpointError(headline, problems)
    return config, ends, packed_weights(config, mesh, arrays)


def _report(progress: Progress, before: int, total: int, done: int, _: int) -> None:
    progress(before + done, total)


def _zeros(config: MuseSparkConfig, mesh: Mesh):
    """A program that makes the arrays of all layers on the devices."""
    shapes = {name: x for name, x in decode_shapes(config).items() if name != "ranks" and name not in ENDS}
    shardings = {name: sharding for name, sharding in decode_shardings(mesh).items() if name in shapes}
    return jax.jit(lambda: {name: jnp.zeros(x.shape, x.dtype) for name, x in shapes.items()}, out_shardings=shardings)


@dataclasses.dataclass
class _Part:
    """Some of a source's parameters, under names of their own."""

    source: Source
    names: dict[str, str]

    @property
    def config(self) -> MuseSparkConfig:
        return self.source.config

    @property
    def specs(self) -> Mapping[str, ParamSpec]:
        return {own: self.source.specs[name] for own, name in self.names.items()}

    @property
    def problems(self) -> list[str]:
        return self.source.problems

    def rows(self, name: str, start: int, stop: int) -> np.ndarray:
        return self.source.rows(self.names[name], start, stop)


def _parts(source: Source) -> Iterator[tuple[int | None, _Part]]:
    """What lies outside the layers, then each layer as layer 0."""
    yield None, _Part(source, {name: name for name in source.specs if not name.startswith("layers.")})
    for layer in range(source.config.num_hidden_layers):
        prefix = f"layers.{layer}."
        names = {"layers.0." + name.removeprefix(prefix): name for name in source.specs if name.startswith(prefix)}
        yield layer, _Part(source, names)


def _store(
    config: MuseSparkConfig, mesh: Mesh, arrays: Mapping[str, jax.Array], params: Params, layer: int
) -> dict[str, jax.Array]:
    """Packs one layer into its places; the arrays and the parameters are donated."""
    form = config.expert_formats[layer]
    # Packing knows nothing of attention: one program for each format of experts.
    one = config.replace(
        num_hidden_layers=1, layer_types=("full_attention",), layer_rope_theta=(0.0,), expert_formats=(form,)
    )
    skipped = EXPERTS["nvfp4" if form == "bf16" else "bf16"]
    given = {name: x for name, x in arrays.items() if name not in (*skipped, *ENDS)}
    index = config.expert_formats[:layer].count(form)
    return _stored(one, mesh)(given, params, jnp.int32(layer), jnp.int32(index))


@functools.lru_cache(maxsize=16)
def _stored(one: MuseSparkConfig, mesh: Mesh):
    # Not by is_fully_replicated: on one device everything is.
    layer_axis = {name: 0 if spec == REPLICATED else 1 for name, spec in SPECS.items()}
    kinds = EXPERTS[one.expert_formats[0]]

    def run(arrays: dict[str, jax.Array], params: Params, layer: jax.Array, index: jax.Array) -> dict[str, jax.Array]:
        packed = pack_layers(one, mesh, params)
        return {
            name: lax.dynamic_update_slice_in_dim(x, packed[name], index if name in kinds else layer, layer_axis[name])
            for name, x in arrays.items()
        }

    names = [name for name in decode_shardings(mesh) if name not in (*ENDS, *EXPERTS["bf16"], *EXPERTS["nvfp4"])]
    shardings = {name: decode_shardings(mesh)[name] for name in (*names, *kinds)}
    return jax.jit(run, donate_argnums=(0,), out_shardings=shardings)
