"""Names <-> arrays: import, export, save, restore, convert and random weights."""

from muse_jax.weights.checkpoints import load, read_contents
from muse_jax.weights.contents import Contents
from muse_jax.weights.convert import Conversion, convert_checkpoint
from muse_jax.weights.names import Params, ParamSpec, check_params, parameter_specs, stored_formats
from muse_jax.weights.orbax_io import restore, save
from muse_jax.weights.random import random_params
from muse_jax.weights.safetensors_export import export_hf
from muse_jax.weights.safetensors_io import import_hf

__all__ = [
    "Contents", "Conversion", "ParamSpec", "Params", "check_params", "convert_checkpoint", "export_hf", "import_hf",
    "load", "parameter_specs", "random_params", "read_contents", "restore", "save", "stored_formats",
]  # fmt: skip
