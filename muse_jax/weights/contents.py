"""What a checkpoint folder holds, by its headers alone; made by `safetensors_io` and `orbax_io`, which load from it."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from muse_jax.config import MuseSparkConfig
from muse_jax.weights.names import ParamSpec


@dataclasses.dataclass(frozen=True)
class Contents:
    """A folder's tensors and what is wrong with them. No weight was read."""

    folder: Path
    kind: Literal["orbax", "safetensors"]
    config: MuseSparkConfig | None
    """The model, its expert formats completed by the tensors' dtypes; None where config.json cannot be used."""
    tensors: Mapping[str, Any]
    """Our name -> something with shape and dtype, as stored. Empty where the files cannot say."""
    specs: Mapping[str, ParamSpec]
    """The parameters that loading makes of them; empty without a configuration."""
    problems: list[str]
    """Everything missing, unexpected, mis-shaped, of another dtype or unreadable: file, tensor, expected, found."""
    passed_over: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Tensors that the text decoder has no use for, by the name in the file."""
    unread: tuple[str, ...] = ()
    """safetensors files that are no part of the model: not in its index, or beside model.safetensors."""
