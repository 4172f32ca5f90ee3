"""Folders that appear complete or not at all."""

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from muse_jax.errors import CheckpointError


@contextlib.contextmanager
def new_folder(path: "str | os.PathLike[str]", overwrite: bool = False) -> Iterator[Path]:
    """Yields a temporary sibling of `path` to write into, and renames it to `path` if the block succeeds.

    Raises:
        CheckpointError: `path` exists already and `overwrite` is false.
    """
    final = Path(path).absolute()
    if os.path.lexists(final) and not overwrite:
        raise CheckpointError(
            f"cannot write {final}", ["exists already; choose another name, remove it, or pass overwrite=True"]
        )
    final.parent.mkdir(parents=True, exist_ok=True)
    partial = final.with_name(f".{final.name}.partial-{os.getpid()}")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    try:
        yield partial
        if os.path.lexists(final):
            # A folder cannot be replaced in one step; the old one keeps its content until the new one is in place.
            old = final.with_name(f".{final.name}.old-{os.getpid()}")
            os.rename(final, old)
            os.rename(partial, final)
            if old.is_dir() and not old.is_symlink():
                shutil.rmtree(old)
            else:
                old.unlink()
        else:
            os.rename(partial, final)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
