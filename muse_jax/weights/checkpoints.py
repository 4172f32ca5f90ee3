"""Checkpoint folders of either kind: which one it is, what it holds, its parameters."""

import os
from pathlib import Path

from jax.sharding import Mesh

from muse_jax.config import MuseSparkConfig
from muse_jax.config_checks import as_path
from muse_jax.errors import CheckpointError
from muse_jax.weights import orbax_io, safetensors_io
from muse_jax.weights.contents import Contents
from muse_jax.weights.hf_names import RowOrder
from muse_jax.weights.names import Params
from muse_jax.weights.transfer import Files, Progress


def load(
    path: "str | os.PathLike[str]", mesh: Mesh | None = None, *, progress: Progress | None = None
) -> tuple[MuseSparkConfig, Params]:
    """Loads a checkpoint folder, ours or Hugging Face's, onto a mesh (default: `make_mesh()`).

    Every device reads its own slices only. `progress` is called with (bytes read, bytes in all).

    Returns:
        (config, params): params as in `parameter_specs`, with its shardings.

    Raises:
        CheckpointError: neither kind of folder, or what `restore` or `import_hf` say.
        TypeError: `path` is no path.
    """
    folder = as_path("path", path)
    read = orbax_io.restore if _is_ours(folder, "load") else safetensors_io.import_hf
    return read(folder, mesh, progress=progress)


def read_contents(path: "str | os.PathLike[str]") -> Contents:
    """What a checkpoint folder, ours or Hugging Face's, holds by its headers, and what is wrong there.

    Raises:
        CheckpointError: neither kind of folder.
        TypeError: `path` is no path.
    """
    folder = as_path("path", path)
    return orbax_io.read_contents(folder) if _is_ours(folder, "inspect") else safetensors_io.read_contents(folder)


def open_source(folder: Path, row_order: RowOrder | None, purpose: str = "convert") -> tuple[Contents, Files]:
    """The parameters of a folder of either kind, to be read in pieces.

    Args:
        row_order: as in `import_hf`; None for our own form.
        purpose: what the caller wants to do, for the error.

    Raises:
        CheckpointError: neither kind of folder, or everything that its headers show to be wrong.
    """
    headline = f"cannot {purpose} {folder}"
    if ours := _is_ours(folder, purpose):
        if row_order is not None:
            raise CheckpointError(headline, [f"source_rows: given {row_order!r}, but our own form has one order only"])
        contents = orbax_io.read_contents(folder)
    else:
        contents = safetensors_io.read_contents(folder, row_order)
    if contents.problems:
        raise CheckpointError(headline, contents.problems)
    source = orbax_io.OrbaxSource(contents) if ours else safetensors_io.SafetensorsSource(contents, row_order)
    return contents, source


def _is_ours(folder: Path, purpose: str) -> bool:
    """Whether it is our kind of folder rather than Hugging Face's."""
    if not folder.is_dir():
        raise CheckpointError(f"cannot {purpose} {folder}", ["no such folder; check the path"])
    if orbax_io.is_ours(folder):
        return True
    if any(folder.glob("*.safetensors*")):
        return False
    raise CheckpointError(
        f"cannot {purpose} {folder}",
        ["neither our params/ nor any *.safetensors in it; give the folder that holds the model's config.json"],
    )
