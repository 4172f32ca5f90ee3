"""A checkpoint straight into the decode layout, layer by layer: the devices never hold the training layout of more than
one layer, which for the release is the difference between eight H200s and more than there are in a host."""

import dataclasses
import functools
import os
from collections.abc import Iterator, Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from muse_jax.config import MuseSparkConfig
from muse_jax.config_checks import as_path
from muse_jax.decode.weights import DecodeWeights
from muse_jax.errors import CheckpointError
from muse_jax.mesh import check_mesh
from muse_jax.weights.checkpoints import open_source
from muse_jax.weights.loading import load_source
from muse_jax.weights.names import Params, ParamSpec
from muse_jax.weights.refit import write
from muse_jax.weights.repack import decode_shapes, decode_shardings, packed_weights
from muse_jax.weights.transfer import Progress, Source


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
    folder = as_path("path", path)
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
        arrays |= write(config, mesh, arrays, params, layer)
        if layer is None:
            ends = params
        del params  # before the next layer comes
    if problems:
        raise CheckpointError(headline, problems)
    return config, ends, packed_weights(config, mesh, arrays)


def _report(progress: Progress, before: int, total: int, done: int, _: int) -> None:
    progress(before + done, total)


def _zeros(config: MuseSparkConfig, mesh: Mesh):
    """A program that makes all arrays on the devices."""
    shapes = {name: x for name, x in decode_shapes(config).items() if name != "ranks"}
    return jax.jit(
        lambda: {name: jnp.zeros(x.shape, x.dtype) for name, x in shapes.items()}, out_shardings=decode_shardings(mesh)
    )


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
