"""Checkpoints from one form to another, in pieces: little memory, and a run that was stopped goes on where it was.

Every piece is on the disk before the journal says so, and the folder has its name when all of them are.
"""

import dataclasses
import hashlib
import os
import shutil
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from muse_jax.config_checks import as_path
from muse_jax.errors import CheckpointError
from muse_jax.tokenizer import TOKENIZER_FILE
from muse_jax.weights.checkpoints import open_source
from muse_jax.weights.folders import ResumableFolder
from muse_jax.weights.hf_names import ROW_ORDERS, RowOrder
from muse_jax.weights.names import ParamSpec, nbytes
from muse_jax.weights.orbax_io import OrbaxTarget
from muse_jax.weights.quantize import QuantizedSource
from muse_jax.weights.safetensors_export import MAX_SHARD_BYTES, SafetensorsTarget
from muse_jax.weights.transfer import Files, Piece, Progress, Target, piece_bytes, pieces, transfer

Form = Literal["orbax", "hf", "meta"]
"""Of a checkpoint: ours, or safetensors with q and k rows in Hugging Face's or Meta's order."""
FORMS: tuple[Form, ...] = ("orbax", "hf", "meta")
_CARRIED = (
    TOKENIZER_FILE, "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja", "generation_config.json",
)  # fmt: skip
_SPARE_BYTES = 64 << 20  # for the file system's own needs and the small files


@dataclasses.dataclass(frozen=True)
class Conversion:
    """What `convert_checkpoint` did."""

    folder: Path
    form: Form
    bytes: int
    """Of all parameters."""
    resumed_bytes: int
    """Of these, written by earlier runs."""
    seconds: float
    left_out: Mapping[str, int]
    """Tensors that the text decoder has no use for and their bytes: they are not in the new folder."""


def convert_checkpoint(
    source: "str | os.PathLike[str]", target: "str | os.PathLike[str]", *, to: Form | None = None,
    source_rows: RowOrder | None = None, quantize: bool = False,
    input_scales: "str | os.PathLike[str] | None" = None, max_shard_bytes: int = MAX_SHARD_BYTES,
    progress: Progress | None = None,
) -> Conversion:  # fmt: skip
    """Converts a checkpoint folder between our form and Hugging Face's or Meta's safetensors, losing no bit.

    Only pieces of about 128 MiB are in memory. A run that was stopped, however, leaves `.TARGET.partial`; the same call
    goes on with it and ends with the same bytes. Of a source file that has changed since, everything is read again.

    Args:
        source: the folder; for what is accepted see `import_hf`.
        target: the new folder; appears when complete.
        to: the form to make. Default: the other one, "hf" from ours and "orbax" from safetensors.
        source_rows: order of the q_proj and k_proj rows in safetensors files, see `import_hf`.
        quantize: bf16 experts become NVFP4 by ModelOpt's formula (docs/numerics.md 8), in the layers whose arithmetic
            is NVFP4 by the configuration, or else in all but the first and the last.
        input_scales: file of input scales for those layers, as `muse-jax calibrate` makes it; without one they are 1.
        max_shard_bytes: of a safetensors file; a larger tensor has a file to itself.
        progress: called with (bytes done, bytes in all).

    Raises:
        CheckpointError: everything that is wrong with the source (each with file, tensor, expected, found), or it has
            nothing to quantise, the target exists, another process or conversion is at it, or the disk is too small.
            What headers and sizes show is found before anything is written, impossible values and changed chunks during
            the run.
        ValueError: `to` or `source_rows` is none of the allowed words, or `input_scales` without `quantize`.
        TypeError: `source` or `target` is no path.
    """
    begin = time.monotonic()
    folder, target = as_path("source", source), as_path("target", target)
    _check_choice("to", to, FORMS)
    _check_choice("source_rows", source_rows, ROW_ORDERS)
    contents, origin = open_source(folder, source_rows)
    digest = None
    if quantize:
        origin = QuantizedSource(origin, input_scales)
        digest = None if input_scales is None else hashlib.sha256(Path(input_scales).read_bytes()).hexdigest()
    elif input_scales is not None:
        raise ValueError("input_scales: of no use without quantize")
    to = to or ("orbax" if contents.kind == "safetensors" else "hf")
    plan = {
        "form": to, "source_rows": source_rows, "shards": max_shard_bytes, "config": origin.config.to_hf(),
        "pieces": _digest(origin.specs), "input_scales": digest,
    }  # fmt: skip
    growing = ResumableFolder(target, plan)
    versions = {name: _version(origin, name) for name in origin.specs}
    done = {*pieces(origin.specs)} if growing.complete else _done(growing.lines(), origin.specs, versions)
    resumed = sum(piece_bytes(origin.specs, piece) for piece in done)
    total = sum(spec.nbytes for spec in origin.specs.values())
    if not growing.complete:
        _check_space(growing, total - resumed)
    try:
        with growing.open():
            if not growing.complete:
                made = _target(growing.content, to, origin, max_shard_bytes)

                def record(piece: Piece) -> None:
                    growing.record(f"{piece.name} {piece.start} {versions[piece.name]}")

                if problems := transfer(origin, made, done=done, record=record, progress=progress):
                    raise CheckpointError(f"cannot convert {source} ({_what_stays(growing)})", problems)
                for name in _CARRIED:
                    if (folder / name).is_file():
                        shutil.copyfile(folder / name, growing.content / name)
                made.finish()
            growing.finish()
    except OSError as error:
        raise CheckpointError(f"cannot write {growing.final}", [f"{error}; {_what_stays(growing)}"]) from error
    left_out = {key: nbytes(tensor.shape, tensor.dtype) for key, tensor in contents.passed_over.items()}
    return Conversion(growing.final, to, total, resumed, time.monotonic() - begin, left_out)


def _what_stays(growing: ResumableFolder) -> str:
    if not growing.partial.is_dir():
        return "nothing was written"
    return f"what is written stays in {growing.partial}: the same call goes on with it"


def _check_choice(name: str, given: str | None, allowed: tuple[str, ...]) -> None:
    if given is not None and given not in allowed:
        raise ValueError(f"{name}: given {given!r}, allowed: {', '.join(map(repr, allowed))}, or nothing")


def _target(folder: Path, form: Form, source: Files, max_shard_bytes: int) -> Target:
    if form == "orbax":
        return OrbaxTarget(folder, source.config, source.specs)
    return SafetensorsTarget(folder, source.config, source.specs, max_shard_bytes, row_order=form)


def _digest(specs: Mapping[str, ParamSpec]) -> str:
    """Of how the parameters are cut."""
    text = "\n".join(f"{piece} {specs[piece.name].describe()}" for piece in pieces(specs))
    return hashlib.sha256(text.encode()).hexdigest()


def _version(source: Files, name: str) -> str:
    """Changes when one of the files that hold a parameter does."""
    stats = [(file.name, os.stat(file)) for file in source.files(name)]
    text = "\n".join(f"{name} {stat.st_size} {stat.st_mtime_ns}" for name, stat in stats)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _done(lines: list[str], specs: Mapping[str, ParamSpec], versions: Mapping[str, str]) -> set[Piece]:
    """Pieces that are on the disk, of source files that are still the same."""
    written = {tuple(key): version for *key, version in (line.split(" ") for line in lines)}  # the last one counts
    return {p for p in pieces(specs) if written.get((p.name, str(p.start))) == versions[p.name]}


def _check_space(growing: ResumableFolder, needed: int) -> None:
    folder = growing.final.parent
    while not folder.exists():
        folder = folder.parent
    free, needed = shutil.disk_usage(folder).free, needed + _SPARE_BYTES
    if free < needed:
        reason = f"{folder}: expected {needed:,} free bytes, found {free:,}; free some or use another disk"
        raise CheckpointError(f"cannot write {growing.final}", [reason])
