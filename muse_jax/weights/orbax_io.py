"""Our own checkpoint folders: config.json, tokenizer.json and an Orbax checkpoint of the parameters.

Orbax restores straight onto any mesh, but it returns wrong numbers without a word when a data file has a flipped bit.
`files.json` therefore holds size and CRC-32 of every file below `params/`.
"""

import json
import logging
import math
import os
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh
from orbax.checkpoint import v1 as ocp
from tokenizers import Tokenizer

from muse_jax import config_hf
from muse_jax.config import MuseSparkConfig
from muse_jax.errors import CheckpointError, ConfigError
from muse_jax.mesh import check_mesh, make_mesh
from muse_jax.tokenizer import TOKENIZER_FILE
from muse_jax.weights.contents import Contents
from muse_jax.weights.folders import new_folder
from muse_jax.weights.names import Params, check_params, parameter_specs

PARAMS_FOLDER = "params"
FILES_FILE = "files.json"
_METADATA_BYTES = 1 << 24  # the files that Orbax's metadata stands in are smaller
_HELP = "copy the checkpoint again, or make it anew"


def save(
    path: "str | os.PathLike[str]", config: MuseSparkConfig, params: Mapping[str, jax.Array],
    tokenizer: Tokenizer | None = None, *, overwrite: bool = False,
) -> None:  # fmt: skip
    """Writes a checkpoint folder; it appears under its name only when complete.

    Args:
        path: the folder, created.
        params: as in `parameter_specs`, on any mesh; NVFP4 layers may hold codes or bf16 masters.
        overwrite: replace an existing folder.

    Raises:
        CheckpointError: `params` is not a complete set for `config`, the folder exists, or JAX runs in several
            processes (save from a single one).
    """
    headline = f"cannot save {path}"
    if jax.process_count() > 1:
        raise CheckpointError(headline, ["JAX runs in several processes; save from a single-process run"])
    _, problems = check_params(config, params)
    if problems:
        raise CheckpointError(f"{headline}: the parameters do not fit the configuration", problems)
    with new_folder(path, overwrite) as partial:
        (partial / config_hf.CONFIG_FILE).write_text(config.to_json(), encoding="utf-8")
        if tokenizer is not None:
            (partial / TOKENIZER_FILE).write_text(tokenizer.to_str(pretty=True), encoding="utf-8")
        ocp.save(str(partial / PARAMS_FOLDER), dict(params))
        files = {str(file.relative_to(partial)): _fingerprint(file) for file in _files(partial / PARAMS_FOLDER)}
        (partial / FILES_FILE).write_text(json.dumps(files, indent=2) + "\n", encoding="utf-8")


def restore(
    path: "str | os.PathLike[str]", mesh: Mesh | None = None, *, verify: bool = True
) -> tuple[MuseSparkConfig, Params]:
    """Reads a folder written by `save` onto a mesh of any size.

    Args:
        mesh: defaults to `make_mesh()`.
        verify: compare the files' checksums, which reads them twice. Sizes are compared in any case.

    Returns:
        (config, params): the saved bytes, with the shardings of `parameter_specs`.

    Raises:
        CheckpointError: lists every file that is missing, truncated or changed; or every parameter that does not fit
            config.json.
    """
    folder = Path(path).absolute()
    headline = f"cannot restore {folder}"
    mesh = make_mesh() if mesh is None else check_mesh(mesh)
    if not folder.is_dir():
        raise CheckpointError(headline, ["no such folder; check the path"])
    contents = read_contents(folder, verify=math.inf if verify else 0)
    config, specs = contents.config, contents.specs
    if contents.problems or config is None:
        raise CheckpointError(headline, contents.problems)
    wanted = {n: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=s.sharding(mesh)) for n, s in specs.items()}
    try:
        params = ocp.load(str(folder / PARAMS_FOLDER), wanted)
    except Exception as error:
        raise CheckpointError(headline, [f"{PARAMS_FOLDER}: {_first_line(error)}; {_HELP}"]) from error
    return config, {name: params[name] for name in specs}


def read_contents(folder: Path, *, verify: float = _METADATA_BYTES) -> Contents:
    """What a folder written by `save` holds, by configuration, file sizes and Orbax's metadata.

    Checksums are compared of files of up to `verify` bytes, which are read for it.
    """
    config, problems = None, []
    try:
        config = MuseSparkConfig.from_hf(config_hf.read_json(folder / config_hf.CONFIG_FILE))
    except ConfigError as error:
        problems += [f"{config_hf.CONFIG_FILE}: {problem}" for problem in error.problems]
    files = _file_problems(folder, verify)
    problems += files
    found = {} if files else _metadata(folder, problems)
    if config is None:
        return Contents(folder, "orbax", None, found, {}, problems)
    if problems:  # nothing to compare
        return Contents(folder, "orbax", config, found, parameter_specs(config), problems)
    specs, differing = check_params(config, found)
    return Contents(folder, "orbax", config, found, specs, [f"{PARAMS_FOLDER}: {problem}" for problem in differing])


def _metadata(folder: Path, problems: list[str]) -> Mapping[str, Any]:
    """Name -> shape and dtype, as Orbax knows them; why there are none is added to the problems."""
    absl = logging.getLogger("absl")  # Orbax's; what it would warn of is returned as a problem
    level = absl.level
    absl.setLevel(logging.CRITICAL)
    try:
        found = ocp.metadata(str(folder.absolute() / PARAMS_FOLDER)).metadata
    except Exception as error:  # Orbax has no common base class for what a damaged checkpoint raises
        problems.append(f"{PARAMS_FOLDER}: {_first_line(error)}; {_HELP}")
        return {}
    finally:
        absl.setLevel(level)
    if not isinstance(found, Mapping):  # Orbax's answer to some kinds of damage
        problems.append(f"{PARAMS_FOLDER}: Orbax cannot read what it holds; {_HELP}")
        return {}
    strange = [name for name, array in found.items() if not hasattr(array, "shape") or not hasattr(array, "dtype")]
    problems += [f"{PARAMS_FOLDER}: {name}: expected an array, found something else; {_HELP}" for name in strange]
    return {name: array for name, array in found.items() if name not in strange}


def is_ours(folder: Path) -> bool:
    """Whether a folder was written by `save` (whatever its state)."""
    return (folder / PARAMS_FOLDER).is_dir() or (folder / FILES_FILE).is_file()


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:200]}"


def _files(folder: Path) -> list[Path]:
    return sorted(file for file in folder.rglob("*") if file.is_file())


def _fingerprint(file: Path) -> dict[str, int | str]:
    crc, size = 0, 0
    with file.open("rb") as stream:
        while chunk := stream.read(1 << 24):
            crc, size = zlib.crc32(chunk, crc), size + len(chunk)
    return {"bytes": size, "crc32": f"{crc:08x}"}


def _file_problems(folder: Path, verify: float) -> list[str]:
    """Sizes of all files below `params/`, checksums of those of up to `verify` bytes."""
    try:
        expected = config_hf.read_json(folder / FILES_FILE)
    except ConfigError as error:
        return [f"{FILES_FILE}: {problem}" for problem in error.problems]
    problems = []
    for name, entry in expected.items():
        if not isinstance(entry, dict) or ".." in Path(name).parts or Path(name).is_absolute():
            problems.append(f"{FILES_FILE}: entry {name!r} is not of a file below {PARAMS_FOLDER}; {_HELP}")
            continue
        file = folder / name
        if not file.is_file():
            problems.append(f"{name}: missing; {_HELP}")
        elif file.stat().st_size != entry.get("bytes"):
            problems.append(f"{name}: expected {entry.get('bytes')} bytes, found {file.stat().st_size}; {_HELP}")
        elif file.stat().st_size <= verify and _fingerprint(file) != entry:
            problems.append(f"{name}: its CRC-32 is not {entry.get('crc32')}: the content has changed; {_HELP}")
    return problems
