"""Names <-> arrays: import, export, save, restore and random weights."""

import os
from pathlib import Path

from jax.sharding import Mesh

from muse_jax.config import MuseSparkConfig
from muse_jax.errors import CheckpointError
from muse_jax.weights import orbax_io, safetensors_io
from muse_jax.weights.contents import Contents
from muse_jax.weights.names import Params, ParamSpec, check_params, parameter_specs, stored_formats
from muse_jax.weights.orbax_io import restore, save
from muse_jax.weights.random import random_params
from muse_jax.weights.safetensors_export import export_hf
from muse_jax.weights.safetensors_io import import_hf
from muse_jax.weights.transfer import Progress

__all__ = [
    "Contents", "ParamSpec", "Params", "check_params", "export_hf", "import_hf", "load", "parameter_specs",
    "random_params", "read_contents", "restore", "save", "stored_formats",
]  # fmt: skip


def load(
    path: "str | os.PathLike[str]", mesh: Mesh | None = None, *, progress: Progress | None = None
) -> tuple[MuseSparkConfig, Params]:
    """Loads a checkpoint folder, ours or Hugging Face's, onto a mesh (default: `make_mesh()`).

    Every device reads its own slices only. `progress` is called with (bytes read, bytes in all).

    Returns:
        (config, params): params as in `parameter_specs`, with its shardings.

    Raises:
        CheckpointError: neither kind of folder, or what `restore` or `import_hf` say.
    """
    folder = Path(path)
    read = restore if _is_ours(folder, "load") else import_hf
    return read(folder, mesh, progress=progress)


def read_contents(path: "str | os.PathLike[str]") -> Contents:
    """What a checkpoint folder, ours or Hugging Face's, holds by its headers, and what is wrong there.

    Raises:
        CheckpointError: neither kind of folder.
    """
    folder = Path(path)
    return orbax_io.read_contents(folder) if _is_ours(folder, "inspect") else safetensors_io.read_contents(folder)


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
