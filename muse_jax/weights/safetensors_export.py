"""Hugging Face checkpoint folders, written piece by piece."""

import json
import os
from collections.abc import Mapping
from pathlib import Path

import jax
import numpy as np
from tokenizers import Tokenizer

from muse_jax import config_hf
from muse_jax.config import MuseSparkConfig
from muse_jax.config_checks import as_path
from muse_jax.errors import CheckpointError
from muse_jax.weights import hf_names
from muse_jax.weights.hf_names import RowOrder
from muse_jax.weights.names import ParamSpec, check_params, stored_formats
from muse_jax.weights.safetensors_file import FileWriter, open_file
from muse_jax.weights.safetensors_io import INDEX_FILE, SINGLE_FILE
from muse_jax.weights.transfer import ParamsSource, write_folder

MAX_SHARD_BYTES = 5 << 30


def export_hf(
    folder: "str | os.PathLike[str]", config: MuseSparkConfig, params: Mapping[str, jax.Array],
    tokenizer: Tokenizer | None = None, *, max_shard_bytes: int = MAX_SHARD_BYTES, overwrite: bool = False,
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
        TypeError: `folder` is no path.
    """
    folder = as_path("folder", folder)
    specs, problems = check_params(config, params)
    if problems:
        raise CheckpointError(f"cannot export to {folder}: the parameters do not fit the configuration", problems)
    source = ParamsSource(config, specs, params)
    write_folder(
        folder, source, lambda partial: SafetensorsTarget(partial, config, specs, max_shard_bytes), tokenizer, overwrite
    )


class SafetensorsTarget:
    """A Hugging Face folder in the making."""

    def __init__(
        self, folder: Path, config: MuseSparkConfig, specs: Mapping[str, ParamSpec], max_shard_bytes: int,
        row_order: RowOrder = "hf",
    ):  # fmt: skip
        """Makes the files of an existing folder with their headers, or goes on with them."""
        self._folder, self._config, self._specs, self._row_order = folder, config, specs, row_order
        metadata = {"format": "pt"}
        if row_order != "hf":
            metadata[hf_names.ROW_ORDER_KEY] = row_order
        self._file_of: dict[str, str] = {}
        self._writers: dict[str, FileWriter] = {}
        shards = _shards(specs, max_shard_bytes)
        for number, names in enumerate(shards, start=1):
            file = SINGLE_FILE if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
            tensors = {hf_names.hf_key(name): specs[name] for name in names}
            self._writers[file] = FileWriter(folder / file, tensors, metadata)
            self._file_of |= dict.fromkeys(names, file)

    def write(self, name: str, start: int, rows: np.ndarray) -> None:
        """As `Target` says. A piece of q_proj or k_proj holds whole heads."""
        if hf_names.has_rotary_rows(name) and self._row_order == "hf":
            rows = hf_names.to_split_halves(rows)
        self._writers[self._file_of[name]].write(hf_names.hf_key(name), start, rows)

    def finish(self) -> None:
        """Has the library check the files; adds index and configuration."""
        for file in self._writers:
            open_file(self._folder / file)
        if len(self._writers) > 1:
            total = sum(spec.nbytes for spec in self._specs.values())
            weight_map = {hf_names.hf_key(name): self._file_of[name] for name in self._specs}
            index = {"metadata": {"total_size": total}, "weight_map": weight_map}
            (self._folder / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
        settings = self._config.to_hf()
        stored = stored_formats(self._config, {name: spec.dtype for name, spec in self._specs.items()})
        if "nvfp4" in stored:
            settings["quantization_config"] = config_hf.nvfp4_section(stored)
        text = json.dumps(settings, indent=2) + "\n"
        (self._folder / config_hf.CONFIG_FILE).write_text(text, encoding="utf-8")


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
