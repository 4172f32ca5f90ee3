"""Hugging Face checkpoint folders: import and export, byte for byte."""

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh
from safetensors.numpy import save_file
from tokenizers import Tokenizer

from muse_jax import config_hf
from muse_jax.config import MuseSparkConfig
from muse_jax.errors import CheckpointError, ConfigError
from muse_jax.mesh import check_mesh, make_mesh
from muse_jax.tokenizer import TOKENIZER_FILE
from muse_jax.weights import hf_names
from muse_jax.weights.contents import Contents
from muse_jax.weights.folders import new_folder
from muse_jax.weights.names import (
    BF16,
    FP32,
    Params,
    ParamSpec,
    check_params,
    compare,
    parameter_specs,
    place,
    stored_formats,
)  # fmt: skip
from muse_jax.weights.safetensors_file import Tensor, UnreadableFile, open_file
from muse_jax.weights.values import value_problem

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"


def import_hf(folder: "str | os.PathLike[str]", mesh: Mesh | None = None) -> tuple[MuseSparkConfig, Params]:
    """Reads a Hugging Face folder (config.json and safetensors) onto a mesh.

    Accepts the released names with or without `model.language_model.`, one file or an index with shards, stacked
    experts or bf16 `experts.N.{gate,up,down}_proj.weight`, and passes over the omni model's other parts. Rows of q_proj
    and k_proj come out in adjacent-pair order. Which layers are NVFP4 is decided by the dtype of their weights; bf16
    weights in a layer that our own export calls NVFP4 are masters. Absent `*_input_scale` become 1.

    Returns:
        (config, params): params as in `parameter_specs`, with its shardings; `mesh` defaults to `make_mesh()`.

    Raises:
        CheckpointError: lists everything that the configuration and the files' headers show to be wrong (each with
            file, tensor, what was expected and what was found); or, if that is all in order, every tensor with
            impossible values.
    """
    folder = Path(folder)
    headline = f"cannot import {folder}"
    mesh = make_mesh() if mesh is None else check_mesh(mesh)
    contents = read_contents(folder)
    config, specs, found = contents.config, contents.specs, contents.tensors
    if contents.problems or config is None:
        raise CheckpointError(headline, contents.problems)

    problems: list[str] = []
    params: Params = {}
    for name, spec in specs.items():
        parts = _parts(config, name, found)
        for part in parts:
            if (bad := value_problem(name, found[part].read())) is not None:
                problems.append(f"{_where(found[part])}: {bad}")
        if not problems:  # keep looking for problems, but stop filling memory
            params[name] = place(spec, _assemble(spec, parts, found), mesh)
    if problems:
        raise CheckpointError(headline, problems)
    return config, params


def read_contents(folder: Path) -> Contents:
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
    return Contents(folder, "safetensors", config, found, specs, problems, files.passed_over)


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
        index = self._read_index(folder) if (folder / INDEX_FILE).is_file() else None
        if index is not None:
            names = sorted(set(index.values()))
        elif (folder / SINGLE_FILE).is_file():
            names = [SINGLE_FILE]
        else:
            names = sorted(path.name for path in folder.glob("*.safetensors"))
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


def _parts(config: MuseSparkConfig, name: str, found: Mapping[str, Tensor]) -> list[str]:
    """The tensors of the files that make up parameter `name`, in order; none for an absent input scale."""
    if name in found:
        return [name]
    if name.endswith("_input_scale"):
        return []
    prefix, _, leaf = name.rpartition(".")
    kinds = ("gate", "up") if leaf == "gate_up_proj" else ("down",)
    return [f"{prefix}.{e}.{kind}_proj.weight" for e in range(config.num_local_experts) for kind in kinds]


def _assemble(spec: ParamSpec, parts: list[str], found: Mapping[str, Tensor]) -> np.ndarray:
    """A fresh host array. Never a view of the file: JAX may keep host memory, and files can change."""
    if not parts:
        return np.ones(spec.shape, FP32)
    if len(parts) > 1:
        out = np.empty(spec.shape, spec.dtype)
        rows = out.reshape(len(parts), *found[parts[0]].shape)
        for row, part in zip(rows, parts, strict=True):
            row[...] = found[part].read()
        return out
    array = found[parts[0]].read()
    if hf_names.has_rotary_rows(spec.name):
        array = hf_names.to_adjacent(array)
    return np.array(array, order="C")


def export_hf(
    folder: "str | os.PathLike[str]", config: MuseSparkConfig, params: Mapping[str, jax.Array],
    tokenizer: Tokenizer | None = None, *, max_shard_bytes: int = 5 << 30, overwrite: bool = False,
) -> None:  # fmt: skip
    """Writes a Hugging Face folder that `import_hf` reads back byte for byte.

    Args:
        folder: created; appears only when complete.
        params: as in `parameter_specs`; layers may hold NVFP4 codes or bf16.
        tokenizer: also written, as tokenizer.json.
        max_shard_bytes: above this, the tensors are spread over several files with an index.
        overwrite: replace an existing folder.

    Raises:
        CheckpointError: `params` is not a complete set for `config`, or the folder exists.
    """
    specs, problems = check_params(config, params)
    if problems:
        raise CheckpointError(f"cannot export to {folder}: the parameters do not fit the configuration", problems)
    settings = config.to_hf()
    stored = stored_formats(config, {name: array.dtype for name, array in params.items()})
    if "nvfp4" in stored:
        settings["quantization_config"] = config_hf.nvfp4_section(stored)
    with new_folder(folder, overwrite) as partial:
        (partial / config_hf.CONFIG_FILE).write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
        if tokenizer is not None:
            (partial / TOKENIZER_FILE).write_text(tokenizer.to_str(pretty=True), encoding="utf-8")
        _write_shards(partial, _shards(specs, max_shard_bytes), params)


def _shards(specs: Mapping[str, ParamSpec], limit: int) -> list[list[str]]:
    shards: list[list[str]] = [[]]
    size = 0
    for name, spec in specs.items():
        if shards[-1] and size + spec.nbytes > limit:
            shards.append([])
            size = 0
        shards[-1].append(name)
        size += spec.nbytes
    return shards


def _write_shards(folder: Path, shards: list[list[str]], params: Mapping[str, Any]) -> None:
    weight_map: dict[str, str] = {}
    total = 0
    for number, names in enumerate(shards, start=1):
        file = SINGLE_FILE if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        tensors: dict[str, np.ndarray] = {}
        for name in names:
            array = np.asarray(params[name])
            if hf_names.has_rotary_rows(name):
                array = hf_names.to_split_halves(array)
            tensors[hf_names.hf_key(name)] = np.ascontiguousarray(array)
            weight_map[hf_names.hf_key(name)] = file
            total += array.nbytes
        save_file(tensors, folder / file, metadata={"format": "pt"})
        shutil.copymode(folder / config_hf.CONFIG_FILE, folder / file)  # the library writes for the owner only
    if len(shards) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (folder / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
