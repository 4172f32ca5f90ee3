"""Parameters from a source onto a mesh: every device reads its own rows, and no more than its share is on the host."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from muse_jax.errors import CheckpointError
from muse_jax.mesh import check_mesh, make_mesh
from muse_jax.weights.names import Params, ParamSpec
from muse_jax.weights.safetensors_file import UnreadableFile
from muse_jax.weights.transfer import Progress, Source

_READERS = 8


def load_source(source: Source, mesh: Mesh | None, headline: str, progress: Progress | None = None) -> Params:
    """Reads a source onto a mesh (default: `make_mesh()`), with the shardings of its specs.

    The host holds at most the rows that this process's devices need of two parameters at a time.

    Raises:
        CheckpointError: lists every file that cannot be read and every tensor with impossible values.
    """
    mesh = make_mesh() if mesh is None else check_mesh(mesh)
    total = sum(spec.nbytes for spec in source.specs.values())
    unreadable: dict[str, None] = {}
    params: Params = {}
    done = 0
    if progress is not None:
        progress(done, total)
    with ThreadPoolExecutor(_READERS) as pool:
        previous = None
        for name, spec in source.specs.items():
            array = _placed(source, spec, mesh, pool, unreadable)
            done += spec.nbytes
            if progress is not None:
                progress(done, total)
            if array is None or unreadable or source.problems:
                params.clear()  # look for more problems, but stop filling memory
                continue
            params[name] = array
            jax.block_until_ready(previous)  # transfers lag behind by one parameter at most
            previous = array
    if problems := [*unreadable, *source.problems]:
        raise CheckpointError(headline, problems)
    return params


def _placed(
    source: Source, spec: ParamSpec, mesh: Mesh, pool: ThreadPoolExecutor, unreadable: dict[str, None]
) -> jax.Array | None:
    """The parameter on the mesh; None if some of its rows cannot be read."""
    sharding = spec.sharding(mesh)

    def span(index: Any) -> tuple[int, int]:
        return index[0].indices(spec.shape[0])[:2]

    places = sharding.addressable_devices_indices_map(spec.shape)
    reads = {rows: pool.submit(source.rows, spec.name, *rows) for rows in sorted({*map(span, places.values())})}
    found: dict[tuple[int, int], np.ndarray] = {}
    for rows, read in reads.items():
        try:
            found[rows] = read.result()
        except UnreadableFile as error:
            unreadable[str(error)] = None
    if len(found) < len(reads) or source.problems:
        return None
    return jax.make_array_from_callback(spec.shape, sharding, lambda index: found[span(index)])
