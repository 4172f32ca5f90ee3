"""bf16 experts -> NVFP4 on the way from one form to another (docs/numerics.md 8), an expert at a time."""

import os
import threading
from collections.abc import Mapping
from pathlib import Path

import jax
import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import save_file

from muse_jax.config import MuseSparkConfig
from muse_jax.config_checks import as_path
from muse_jax.config_hf import default_expert_formats
from muse_jax.errors import CheckpointError
from muse_jax.weights.names import FP32, ParamSpec, compare, parameter_specs, stored_formats
from muse_jax.weights.safetensors_file import UnreadableFile, open_file
from muse_jax.weights.transfer import Files
from muse_jax.weights.values import bad_values, describe

_SUFFIXES = ("_input_scale", "_weight_scale_2", "_weight_scale")
InputScales = Mapping[str, np.ndarray]
"""`layers.I.mlp.experts.{gate_up_proj,down_proj}_input_scale` -> fp32 [E, 2] or [E]."""


def quantized_config(config: MuseSparkConfig, specs: Mapping[str, ParamSpec]) -> MuseSparkConfig:
    """The model with NVFP4 experts: in the layers that it says, or else in all but the first and the last.

    Raises:
        CheckpointError: those layers have NVFP4 experts already.
    """
    formats = config.expert_formats
    if "nvfp4" not in formats:
        formats = default_expert_formats(config.num_hidden_layers)
    stored = stored_formats(config, {name: spec.dtype for name, spec in specs.items()})
    if not any(wanted == "nvfp4" and found == "bf16" for wanted, found in zip(formats, stored, strict=True)):
        raise CheckpointError("cannot quantise", ["no layer has bf16 experts that are to be NVFP4; leave it out"])
    return config.replace(expert_formats=formats)


class QuantizedSource:
    """A source whose NVFP4 layers hold codes and scales, made of another's masters."""

    def __init__(self, source: Files, input_scales: "str | os.PathLike[str] | None"):
        """Quantises all layers that `quantized_config` names.

        Args:
            input_scales: file of `write_input_scales`; without one, input scales are 1.

        Raises:
            CheckpointError: what `quantized_config` and `read_input_scales` say.
        """
        self.config = quantized_config(source.config, source.specs)
        stored = stored_formats(source.config, {name: spec.dtype for name, spec in source.specs.items()})
        made = ("nvfp4" if "nvfp4" in both else "bf16" for both in zip(self.config.expert_formats, stored, strict=True))
        self.specs = parameter_specs(self.config, tuple(made))
        self._source = source
        self._input_scales = {} if input_scales is None else read_input_scales(input_scales, self._made())
        self._of = ""
        self._scales: dict[tuple[str, int], np.ndarray] = {}
        """Made along with the codes of parameter `_of`, which come first, and not yet asked for."""
        self._lock = threading.Lock()

    @property
    def problems(self) -> list[str]:
        """Of the masters."""
        return self._source.problems

    def files(self, name: str) -> list[Path]:
        """As `Files` says."""
        return self._source.files(name if self._unchanged(name) else _split(name)[0])

    def rows(self, name: str, start: int, stop: int) -> np.ndarray:
        """As `Source` says."""
        if self._unchanged(name):
            return self._source.rows(name, start, stop)
        base, suffix = _split(name)
        if suffix == "_input_scale":
            whole = self._input_scales.get(name)
            return np.ones((stop - start, *self.specs[name].shape[1:]), FP32) if whole is None else whole[start:stop]
        with self._lock:
            if base != self._of:
                self._of = base
                self._scales.clear()
            return np.stack([self._expert(base, suffix, expert) for expert in range(start, stop)])

    def _made(self) -> dict[str, ParamSpec]:
        return {name: spec for name, spec in self.specs.items() if not self._unchanged(name)}

    def _unchanged(self, name: str) -> bool:
        return self._source.specs.get(name) == self.specs[name]

    def _expert(self, base: str, suffix: str, expert: int) -> np.ndarray:
        if suffix and (kept := self._scales.pop((suffix, expert), None)) is not None:
            return kept
        made = quantize_expert(self._source.rows(base, expert, expert + 1)[0], base.endswith("gate_up_proj"))
        wanted = made.pop(suffix)
        if not suffix:
            self._scales |= {(kind, expert): array for kind, array in made.items()}
        return wanted


def write_input_scales(path: "str | os.PathLike[str]", scales: InputScales, about: Mapping[str, str]) -> None:
    """A safetensors file of input scales; appears when complete. `about` is kept in its metadata.

    Raises:
        CheckpointError: the disk is full or cannot be written.
    """
    partial = Path(f"{as_path('path', path)}.partial")
    try:
        save_file(dict(scales), partial, metadata={"format": "pt", **about})
        os.replace(partial, path)
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"cannot write {path}", [f"{error}; nothing is left of it"]) from error
    finally:
        partial.unlink(missing_ok=True)


def read_input_scales(path: "str | os.PathLike[str]", specs: Mapping[str, ParamSpec]) -> dict[str, np.ndarray]:
    """What `write_input_scales` wrote, for all input scales among these parameters; others are passed over.

    Raises:
        CheckpointError: lists every scale that is missing, mis-shaped, or not finite and above 0.
    """
    headline = f"cannot use the input scales in {path}"
    wanted = {name: spec for name, spec in specs.items() if name.endswith("_input_scale")}
    try:
        found = {name: tensor for name, tensor in open_file(as_path("input_scales", path)).items() if name in wanted}
    except UnreadableFile as error:
        raise CheckpointError(headline, [f"{path}: {error}"]) from error
    if problems := compare(wanted, found, lambda name: f"{path}: {name}"):
        raise CheckpointError(headline, problems)
    scales = {name: tensor.rows(0, tensor.shape[0]) for name, tensor in found.items()}
    bad = {name: found for name, scale in scales.items() if (found := bad_values(name, scale)) is not None}
    if bad:
        raise CheckpointError(headline, [f"{path}: {name}: {describe(name, [found])}" for name, found in bad.items()])
    return scales


def quantize_expert(w: np.ndarray, gate_up: bool) -> dict[str, np.ndarray]:
    """bf16 [N, K] -> codes, scales and weight_scale_2 by suffix; gate and up rows are two tensors."""
    from muse_jax.ops import quantize_weight  # native code; only this needs it

    rows, inner = w.shape
    halves = 2 if gate_up else 1
    with jax.default_device(jax.devices("cpu")[0]):  # the same bits everywhere, and no GPU memory
        codes, scales, scale_2 = map(np.asarray, quantize_weight(jax.numpy.asarray(w.reshape(halves, -1, inner))))
    return {
        "": codes.reshape(rows, inner // 2),
        "_weight_scale": scales.reshape(rows, inner // 16),
        "_weight_scale_2": scale_2 if gate_up else scale_2[0],
    }


def _split(name: str) -> tuple[str, str]:
    """'..._proj_weight_scale' -> ('..._proj', '_weight_scale')."""
    suffix = next((suffix for suffix in _SUFFIXES if name.endswith(suffix)), "")
    return name.removesuffix(suffix), suffix
