"""Hugging Face checkpoint folders, read byte for byte."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from jax.sharding import Mesh

from muse_jax import config_hf
from muse_jax.config import MuseSparkConfig
from muse_jax.config_checks import as_path
from muse_jax.errors import CheckpointError, ConfigError
from muse_jax.weights import hf_names
from muse_jax.weights.contents import Contents
from muse_jax.weights.hf_names import RowOrder
from muse_jax.weights.loading import load_source
from muse_jax.weights.names import BF16, Params, ParamSpec, compare, parameter_specs, stored_formats
from muse_jax.weights.safetensors_file import Tensor, UnreadableFile, open_file
from muse_jax.weights.transfer import Progress
from muse_jax.weights.values import BadValues, bad_values, describe

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"


def import_hf(
    folder: "str | os.PathLike[str]", mesh: Mesh | None = None, *, row_order: RowOrder | None = None,
    progress: Progress | None = None,
) -> tuple[MuseSparkConfig, Params]:  # fmt: skip
    """Reads a Hugging Face folder (config.json and safetensors) onto a mesh; every device reads its own slices only.

    Accepts the released names with or without `model.language_model.`, one file or an index with shards, stacked
    experts or bf16 `experts.N.{gate,up,down}_proj.weight`, and passes over the omni model's other parts. Rows of q_proj
    and k_proj come out in adjacent-pair order. Which layers are NVFP4 is decided by the dtype of their weights; bf16
    weights in a layer that our own export calls NVFP4 are masters. Absent `*_input_scale` become 1.

    Args:
        mesh: defaults to `make_mesh()`.
        row_order: of the files' q_proj and k_proj: "hf" (split halves) or "meta" (adjacent pairs). Default: what the
            files say about themselves, as our own exports do, or else "hf".
        progress: called with (bytes read, bytes in all).

    Returns:
        (config, params): params as in `parameter_specs`, with its shardings.

    Raises:
        CheckpointError: lists everything that the configuration and the files' headers show to be wrong (each with
            file, tensor, what was expected and what was found); or, if that is all in order, every tensor with
            impossible values.
        TypeError: `folder` is no path.
    """
    folder = as_path("folder", folder)
    headline = f"cannot import {folder}"
    contents = read_contents(folder, row_order)
    if contents.problems:
        raise CheckpointError(headline, contents.problems)
    source = SafetensorsSource(contents, row_order)
    return source.config, load_source(source, mesh, headline, progress)


def read_contents(folder: Path, row_order: RowOrder | None = None) -> Contents:
    """What the folder holds, by configuration and headers; see `import_hf` for what is accepted."""
    try:
        raw = config_hf.read_folder(folder)
        config = MuseSparkConfig.from_hf(raw)
    except ConfigError as error:
        problems = [f"{config_hf.CONFIG_FILE}: {problem}" for problem in error.problems]
        files = _Files(folder) if folder.is_dir() else None
        return Contents(
            folder, "safetensors", None, files.tensors if files else {}, {},
            problems + (files.problems if files else []), files.passed_over if files else {},
            files.unread if files else (),
        )  # fmt: skip

    files = _Files(folder)
    found, problems = files.tensors, files.problems
    stored = _stored(config, found)
    ours = config_hf.EXTRA in raw
    config = config.replace(
        expert_formats=tuple(
            configured if ours and kind == "bf16" else kind
            for configured, kind in zip(config.expert_formats, stored, strict=True)
        )
    )
    specs = parameter_specs(config, stored)
    if not files.nothing_to_compare:
        in_files = _specs_in_files(config, specs, found)
        problems += compare({n: s for n, s in in_files.items() if n not in files.lost}, found, files.where)
    problems += _row_order_problems(found, row_order)
    return Contents(folder, "safetensors", config, found, specs, problems, files.passed_over, files.unread)


def _row_order_problems(found: Mapping[str, Tensor], row_order: RowOrder | None) -> list[str]:
    """Where a file says another order of its q and k rows than the caller, or one that we do not know."""
    allowed = hf_names.ROW_ORDERS if row_order is None else (row_order,)
    problems = []
    for file, recorded in {t.path.name: t.metadata.get(hf_names.ROW_ORDER_KEY) for t in found.values()}.items():
        if recorded is not None and recorded not in allowed:
            problems.append(
                f"{file}: its {hf_names.ROW_ORDER_KEY} is {recorded!r}, expected {' or '.join(map(repr, allowed))}; "
                "leave the order of the rows to the file"
            )
    return problems


class SafetensorsSource:
    """The parameters of a folder whose contents are in order; looks at all values that it reads."""

    def __init__(self, contents: Contents, row_order: RowOrder | None = None):
        """`row_order` as in `import_hf`."""
        assert contents.config is not None and not contents.problems
        self.config, self.specs = contents.config, contents.specs
        self._tensors: Mapping[str, Tensor] = contents.tensors
        self._row_order = row_order
        self._bad: dict[str, list[BadValues]] = {}

    @property
    def problems(self) -> list[str]:
        """One for each tensor with impossible values among those read, in the order of the table."""
        return [
            f"{self._where(name, min(bad.index for bad in found))}: {describe(name, found)}"
            for name in (self.specs if self._bad else ())
            if (found := self._bad.get(name))
        ]

    def rows(self, name: str, start: int, stop: int) -> np.ndarray:
        """As `Source` says, with q and k rows in adjacent pairs and experts stacked."""
        tensor = self._tensors.get(name)
        swap = tensor is not None and hf_names.has_rotary_rows(name) and self._order_in(tensor) == "hf"
        first, last = hf_names.whole_heads(start, stop) if swap else (start, stop)
        rows = self._stacked(name, first, last) if tensor is None else tensor.rows(first, last)
        if (bad := bad_values(name, rows, first)) is not None:
            self._bad.setdefault(name, []).append(bad)
        return hf_names.to_adjacent(rows)[start - first : stop - first] if swap else rows

    def _stacked(self, name: str, start: int, stop: int) -> np.ndarray:
        """Experts that the files have one by one, or input scales that they lack."""
        spec = self.specs[name]
        out = np.empty((stop - start, *spec.shape[1:]), spec.dtype)
        if name.endswith("_input_scale"):
            out[...] = 1
            return out
        for expert, row in zip(range(start, stop), out, strict=True):
            at = 0
            for key in _parts(name, expert):
                part = self._tensors[key]
                row[at : at + part.shape[0]] = part.rows(0, part.shape[0])
                at += part.shape[0]
        return out

    def files(self, name: str) -> list[Path]:
        """As `Files` says."""
        if name in self._tensors:
            return [self._tensors[name].path]
        if name.endswith("_input_scale"):
            return []
        experts = range(self.specs[name].shape[0])
        return sorted({self._tensors[key].path for e in experts for key in _parts(name, e)})

    def _order_in(self, tensor: Tensor) -> str:
        return self._row_order or tensor.metadata.get(hf_names.ROW_ORDER_KEY, "hf")

    def _where(self, name: str, index: Sequence[int]) -> str:
        if (tensor := self._tensors.get(name)) is None:
            parts = _parts(name, index[0])
            tensor = self._tensors[parts[index[1] * len(parts) // self.specs[name].shape[1]]]
        return _where(tensor)


class _Files:
    """The folder's tensors under our names, and what is wrong with the files themselves."""

    def __init__(self, folder: Path):
        self.tensors: dict[str, Tensor] = {}
        self.passed_over: dict[str, Tensor] = {}
        """Tensors that the text decoder has no use for, by the name in the file."""
        self.problems: list[str] = []
        self.lost: set[str] = set()
        """Names that the index places in a file already reported: their absence is no news."""
        self.nothing_to_compare = False
        index = self._read_index(folder) if (folder / INDEX_FILE).exists() else None
        if index is not None:
            names = sorted(set(index.values()))
        elif (folder / SINGLE_FILE).is_file():
            names = [SINGLE_FILE]
        else:
            names = sorted(path.name for path in folder.glob("*.safetensors"))
        # Adapters, say, or a copy in another form. Hugging Face's loader passes over them silently.
        self.unread = tuple(sorted({path.name for path in folder.glob("*.safetensors")} - {*names})) if names else ()
        """Files that are no part of the model."""
        if not names:
            self.nothing_to_compare = True
            if not self.problems:
                self.problems.append(f"{SINGLE_FILE}: missing; the folder has no safetensors files, download them")
            return
        unreadable = set()
        for file in names:
            try:
                self._add(open_file(folder / file), file, index)
            except UnreadableFile as error:
                unreadable.add(file)
                self.problems.append(f"{file}: {error}")
        if index is None:
            self.nothing_to_compare = bool(unreadable)
        else:
            self.lost |= {n for key, file in index.items() if file in unreadable and (n := hf_names.canonical(key))}

    def _read_index(self, folder: Path) -> dict[str, str]:
        try:
            weight_map = config_hf.read_json(folder / INDEX_FILE).get("weight_map")
        except ConfigError as error:
            self.problems += [f"{INDEX_FILE}: {problem}" for problem in error.problems]
            return {}
        if not isinstance(weight_map, dict) or not all(
            isinstance(file, str) and Path(file).name == file for file in weight_map.values()
        ):
            self.problems.append(f"{INDEX_FILE}: expected a weight_map of tensor names to file names in this folder")
            return {}
        if not weight_map:
            self.problems.append(f"{INDEX_FILE}: weight_map is empty")
        return weight_map

    def _add(self, tensors: Mapping[str, Tensor], file: str, index: Mapping[str, str] | None) -> None:
        for key, tensor in tensors.items():
            name = hf_names.canonical(key)
            if name is None:
                self.passed_over[key] = tensor
                continue
            first = self.tensors.setdefault(name, tensor)
            if first is not tensor:
                self.problems.append(
                    f"{file}: {key}: duplicated, also in {first.path.name} as {first.key}; remove one of the two"
                )
        for key, expected in (index or {}).items():
            if expected == file and key not in tensors and (name := hf_names.canonical(key)):
                self.problems.append(f"{file}: {key}: missing, although {INDEX_FILE} says it is in this file")
                self.lost.add(name)

    def where(self, name: str) -> str:
        tensor = self.tensors.get(name)
        return hf_names.hf_key(name) if tensor is None else _where(tensor)


def _where(tensor: Tensor) -> str:
    return f"{tensor.path.name}: {tensor.key}"


def _stored(config: MuseSparkConfig, found: Mapping[str, Tensor]) -> tuple[str, ...]:
    dtypes = {name: tensor.dtype for name, tensor in found.items()}
    for name in found:
        if (split := hf_names.split_expert(name)) is not None:
            dtypes.setdefault(split[0] + "gate_up_proj", BF16)
    return stored_formats(config, dtypes)


def _specs_in_files(
    config: MuseSparkConfig, specs: Mapping[str, ParamSpec], found: Mapping[str, Tensor]
) -> dict[str, ParamSpec]:
    """The table as these files spell it: experts one by one where they are so named, without absent input scales."""
    result = {n: spec for n, spec in specs.items() if n in found or not n.endswith("_input_scale")}
    singly = {split[0] for name in found if (split := hf_names.split_expert(name)) is not None}
    i, m = config.moe_intermediate_size, config.moe_hidden_size
    for prefix in sorted(singly):
        if prefix + "gate_up_proj" in found or prefix + "down_proj" in found or prefix + "down_proj" not in specs:
            continue  # stacked as well, or not our layer: the single ones are reported as unexpected
        del result[prefix + "gate_up_proj"], result[prefix + "down_proj"]
        for expert in range(config.num_local_experts):
            for part, shape in (("gate", (i, m)), ("up", (i, m)), ("down", (m, i))):
                name = f"{prefix}{expert}.{part}_proj.weight"
                result[name] = ParamSpec(name, shape, BF16)
    return result


def _parts(name: str, expert: int) -> list[str]:
    """The files' tensors that make up one expert of a stacked parameter, in order."""
    prefix, _, leaf = name.rpartition(".")
    kinds = ("gate", "up") if leaf == "gate_up_proj" else ("down",)
    return [f"{prefix}.{expert}.{kind}_proj.weight" for kind in kinds]
