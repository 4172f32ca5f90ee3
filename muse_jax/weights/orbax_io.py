"""Our own checkpoint folders: config.json, tokenizer.json and an Orbax checkpoint of the parameters.

`params/` is what Orbax writes with zarr3 arrays and without OCDBT, and what it reads. The arrays are written with
TensorStore, on which Orbax is built, because Orbax takes whole arrays only. A chunk is a piece (`transfer.pieces`) and
ends in its CRC-32C, which reading checks. Every byte follows from the parameters alone, so that two conversions of the
same weights give the same files.
"""

import json
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import tensorstore as ts
from jax.sharding import Mesh
from tokenizers import Tokenizer

from muse_jax import config_hf
from muse_jax.config import MuseSparkConfig
from muse_jax.config_checks import as_path
from muse_jax.errors import CheckpointError, ConfigError
from muse_jax.weights.contents import Contents
from muse_jax.weights.loading import load_source
from muse_jax.weights.names import Params, ParamSpec, check_params, parameter_specs
from muse_jax.weights.safetensors_file import UnreadableFile
from muse_jax.weights.transfer import ParamsSource, Progress, piece_rows, write_folder

PARAMS_FOLDER = "params"
ARRAYS_FOLDER = f"{PARAMS_FOLDER}/state"  # Orbax's name for the one tree of a checkpoint
_ZARR_FILE = "zarr.json"
_CRC_BYTES = 4
_HELP = "copy the checkpoint again, or make it anew"


def save(
    path: "str | os.PathLike[str]", config: MuseSparkConfig, params: Mapping[str, jax.Array],
    tokenizer: Tokenizer | None = None, *, overwrite: bool = False,
) -> None:  # fmt: skip
    """Writes a checkpoint folder; it appears under its name only when complete.

    Args:
        path: the folder, created.
        params: as in `parameter_specs`, on any mesh; NVFP4 layers may hold codes or bf16 masters.
        tokenizer: also written, as tokenizer.json.
        overwrite: replace an existing folder.

    Raises:
        CheckpointError: `params` is not a complete set for `config`, the folder exists, or JAX runs in several
            processes (save from a single one).
        TypeError: `path` is no path.
    """
    headline = f"cannot save {path}"
    if jax.process_count() > 1:
        raise CheckpointError(headline, ["JAX runs in several processes; save from a single-process run"])
    specs, problems = check_params(config, params)
    if problems:
        raise CheckpointError(f"{headline}: the parameters do not fit the configuration", problems)
    source = ParamsSource(config, specs, params)
    write_folder(path, source, lambda partial: OrbaxTarget(partial, config, specs), tokenizer, overwrite)


def restore(
    path: "str | os.PathLike[str]", mesh: Mesh | None = None, *, progress: Progress | None = None
) -> tuple[MuseSparkConfig, Params]:
    """Reads a folder written by `save` onto a mesh of any size; every device reads its own slices only.

    Args:
        mesh: defaults to `make_mesh()`.
        progress: called with (bytes read, bytes in all).

    Returns:
        (config, params): the saved bytes, with the shardings of `parameter_specs`.

    Raises:
        CheckpointError: lists every file that is missing, truncated or changed, and every parameter that does not fit
            config.json.
    """
    folder = as_path("path", path).absolute()
    headline = f"cannot restore {folder}"
    if not folder.is_dir():
        raise CheckpointError(headline, ["no such folder; check the path"])
    contents = read_contents(folder)
    if contents.problems:
        raise CheckpointError(headline, contents.problems)
    source = OrbaxSource(contents)
    return source.config, load_source(source, mesh, headline, progress)


def is_ours(folder: Path) -> bool:
    """Whether a folder was written by `save` (whatever its state)."""
    return (folder / PARAMS_FOLDER).is_dir()


class OrbaxSource:
    """The parameters of a folder whose contents are in order. Reading checks each chunk's CRC-32C."""

    problems: list[str] = []  # noqa: RUF012  (whatever was saved is valid)

    def __init__(self, contents: Contents):
        """Opens nothing yet."""
        assert contents.config is not None and not contents.problems
        self.config, self.specs = contents.config, contents.specs
        self._folder = contents.folder

    def rows(self, name: str, start: int, stop: int) -> np.ndarray:
        """As `Source` says."""
        try:
            store = ts.open(_store(self._folder, self.specs[name]), read=True).result()
            return store[start:stop].read().result()
        except ValueError as error:  # TensorStore's for everything
            raise UnreadableFile(_damage(self._folder, self.specs[name], error)) from error

    def files(self, name: str) -> list[Path]:
        """As `Files` says."""
        spec = self.specs[name]
        return [self._folder / _chunk_file(spec, number) for number in range(-(-spec.shape[0] // piece_rows(spec)))]


class OrbaxTarget:
    """A folder of our own form in the making."""

    def __init__(self, folder: Path, config: MuseSparkConfig, specs: Mapping[str, ParamSpec]):
        """Writes into an existing folder, or goes on with it."""
        self._folder, self._config, self._specs = folder, config, specs

    def write(self, name: str, start: int, rows: np.ndarray) -> None:
        """As `Target` says; a chunk's file appears when it is complete."""
        try:
            store = ts.open(_store(self._folder, self._specs[name]), create=True, open=True).result()
            store[start : start + len(rows)].write(rows).result()
        except ValueError as error:  # TensorStore's for everything, a full disk among them
            raise OSError(str(error)) from error

    def finish(self) -> None:
        """Adds Orbax's own files and the configuration."""
        for name, text in _orbax_files(self._specs).items():
            (self._folder / name).write_text(text, encoding="utf-8")
        (self._folder / config_hf.CONFIG_FILE).write_text(self._config.to_json(), encoding="utf-8")


def _zarr_metadata(spec: ParamSpec) -> dict[str, Any]:
    """The zarr.json of a parameter."""
    code = {"name": "bytes", "configuration": {"endian": "little"}} if spec.dtype.itemsize > 1 else {"name": "bytes"}
    return {
        "zarr_format": 3,
        "node_type": "array",
        "shape": list(spec.shape),
        "data_type": spec.dtype.name,
        "fill_value": 0 if spec.dtype.kind == "u" else 0.0,
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [piece_rows(spec), *spec.shape[1:]]}},
        "chunk_key_encoding": {"name": "default"},
        "codecs": [code, {"name": "crc32c"}],
    }


def _store(folder: Path, spec: ParamSpec) -> dict[str, Any]:
    """TensorStore's description of a parameter. A chunk that is not there is an error, not zeros."""
    return {
        "driver": "zarr3",
        "kvstore": {"driver": "file", "path": f"{folder / ARRAYS_FOLDER / spec.name}/"},
        "metadata": _zarr_metadata(spec),
        "store_data_equal_to_fill_value": True,
        "fill_missing_data_reads": False,
    }


def _orbax_files(names: Iterable[str]) -> dict[str, str]:
    """What Orbax itself keeps beside the arrays, by path: which arrays are leaves of the tree, and how they lie."""
    leaf = {"value_type": "jax.Array", "skip_deserialize": False}
    tree = {str((n,)): {"key_metadata": [{"key": n, "key_type": 2}], "value_metadata": leaf} for n in names}  # 2: dict
    metadata = {
        "tree_metadata": tree, "use_ocdbt": False, "use_zarr3": True, "store_array_data_equal_to_fill_value": True,
        "custom_metadata": None,
    }  # fmt: skip
    return {
        f"{PARAMS_FOLDER}/_CHECKPOINT_METADATA": json.dumps({"item_handlers": {}}) + "\n",
        f"{PARAMS_FOLDER}/orbax.checkpoint": "",
        f"{ARRAYS_FOLDER}/_METADATA": json.dumps(metadata, indent=1) + "\n",
    }


class _Stored:
    """Shape and dtype that a zarr.json claims."""

    def __init__(self, metadata: Mapping[str, Any]):
        self.shape = tuple(int(n) for n in metadata["shape"])
        self.dtype = np.dtype(metadata["data_type"])
        self.metadata = metadata


def read_contents(folder: Path) -> Contents:
    """What a folder written by `save` holds, by its configuration, the arrays' metadata and the files' sizes."""
    config, problems = None, []
    try:
        config = MuseSparkConfig.from_hf(config_hf.read_json(folder / config_hf.CONFIG_FILE))
    except ConfigError as error:
        problems += [f"{config_hf.CONFIG_FILE}: {problem}" for problem in error.problems]
    arrays = folder / ARRAYS_FOLDER
    if not arrays.is_dir():
        problems.append(f"{ARRAYS_FOLDER}: missing; not written by this release of muse-jax, make the checkpoint anew")
        specs = {} if config is None else parameter_specs(config)
        return Contents(folder, "orbax", config, {}, specs, problems)
    found: dict[str, _Stored] = {}
    unreadable: set[str] = set()
    for path in sorted(arrays.iterdir()):
        if path.is_dir():
            try:
                found[path.name] = _Stored(config_hf.read_json(path / _ZARR_FILE))
            except ConfigError as error:
                problems += [f"{ARRAYS_FOLDER}/{path.name}/{_ZARR_FILE}: {p}" for p in error.problems]
                unreadable.add(path.name)
            except (KeyError, TypeError, ValueError):
                problems.append(f"{ARRAYS_FOLDER}/{path.name}/{_ZARR_FILE}: describes no array of ours; {_HELP}")
                unreadable.add(path.name)
    if config is None:
        return Contents(folder, "orbax", None, found, {}, problems)
    specs, differing = check_params(config, found)
    problems += [f"{PARAMS_FOLDER}: {p}" for p in differing if p.partition(":")[0] not in unreadable]
    for name, spec in specs.items():
        stored = found.get(name)
        if stored is not None and (stored.shape, stored.dtype) == (spec.shape, spec.dtype):
            problems += _chunk_problems(folder, spec, stored)
    problems += _metadata_problems(folder, specs)
    return Contents(folder, "orbax", config, {n: found[n] for n in (*specs, *found) if n in found}, specs, problems)


def _chunk_problems(folder: Path, spec: ParamSpec, stored: _Stored) -> list[str]:
    """Of the files of an array that has the right shape and dtype."""
    array = f"{ARRAYS_FOLDER}/{spec.name}"
    expected = _zarr_metadata(spec)
    if stored.metadata != expected:
        keys = [key for key in {*expected, *stored.metadata} if expected.get(key) != stored.metadata.get(key)]
        return [f"{array}/{_ZARR_FILE}: {', '.join(sorted(keys))}: not as this library writes it; {_HELP}"]
    rows = piece_rows(spec)
    size = spec.nbytes // spec.shape[0] * rows + _CRC_BYTES  # the last one is filled up
    problems = []
    for number in range(-(-spec.shape[0] // rows)):
        name = _chunk_file(spec, number)
        try:
            real = os.stat(folder / name).st_size
        except OSError:
            problems.append(f"{name}: missing; {_HELP}")
            continue
        if real != size:
            problems.append(f"{name}: expected {size} bytes, found {real}; {_HELP}")
    return problems


def _chunk_file(spec: ParamSpec, number: int) -> str:
    return "/".join([ARRAYS_FOLDER, spec.name, "c", str(number), *("0" for _ in spec.shape[1:])])


def _metadata_problems(folder: Path, specs: Mapping[str, ParamSpec]) -> list[str]:
    """Of the files that only Orbax reads: nothing here needs them, but whoever uses Orbax does."""
    problems = []
    for name, text in _orbax_files(specs).items():
        try:
            found = (folder / name).read_bytes()
        except OSError:
            problems.append(f"{name}: missing; {_HELP}")
            continue
        if found != text.encode():
            problems.append(f"{name}: the content has changed; {_HELP}")
    return problems


def _damage(folder: Path, spec: ParamSpec, error: Exception) -> str:
    """What TensorStore says about a file, for a person."""
    text = str(error)
    where = re.search(re.escape(f"{folder}/") + r'([^"]+)', text)
    file = where[1] if where else f"{ARRAYS_FOLDER}/{spec.name}"
    reason = "its CRC-32C differs: the content has changed" if "Digest mismatch" in text else text.splitlines()[0][:200]
    return f"{file}: {reason}; {_HELP}"
