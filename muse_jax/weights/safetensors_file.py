"""One safetensors file as a set of memory-mapped arrays.

The safetensors library checks the file (header, sizes, overlaps). The data is then mapped here, because the library's
NumPy reader has no float8 and because slices of a mapping cost no memory.
"""

import dataclasses
import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors import safe_open

DTYPES: dict[str, np.dtype] = {
    name: np.dtype(kind)
    for name, kind in {
        "BOOL": np.bool_, "U8": np.uint8, "I8": np.int8, "U16": np.uint16, "I16": np.int16, "U32": np.uint32,
        "I32": np.int32, "U64": np.uint64, "I64": np.int64, "F16": np.float16, "F32": np.float32, "F64": np.float64,
        "BF16": ml_dtypes.bfloat16, "F8_E4M3": ml_dtypes.float8_e4m3fn, "F8_E5M2": ml_dtypes.float8_e5m2,
    }.items()
}  # fmt: skip


class UnreadableFile(Exception):
    """Why a file cannot be used, for a person."""


@dataclasses.dataclass(frozen=True)
class Tensor:
    """A tensor of a file; `read()` maps it."""

    path: Path
    key: str
    """Its name in the file."""
    shape: tuple[int, ...]
    dtype: np.dtype
    offset: int

    def read(self) -> np.ndarray:
        """A read-only view of the mapped file. Copy it if it has to outlive changes to the file."""
        count = int(np.prod(self.shape, dtype=np.int64))
        if count == 0:
            return np.zeros(self.shape, self.dtype)
        size = count * self.dtype.itemsize
        raw = np.memmap(self.path, dtype=np.uint8, mode="r", offset=self.offset, shape=(size,))
        return np.asarray(raw).view(self.dtype).reshape(self.shape)


def open_file(path: Path) -> dict[str, Tensor]:
    """The tensors of a file, in the order of its header.

    Raises:
        UnreadableFile: missing, truncated, damaged header, or a dtype NumPy cannot hold.
    """
    try:
        with safe_open(path, framework="numpy"):
            pass
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header: dict[str, Any] = json.loads(file.read(length))
    except FileNotFoundError as error:
        raise UnreadableFile("missing; download it again") from error
    except Exception as error:  # SafetensorError derives from Exception only; OSError and JSON errors mean the same
        reason = f"cannot be read as safetensors ({error}); truncated or damaged, download it again"
        raise UnreadableFile(reason) from error
    header.pop("__metadata__", None)
    unknown = sorted({str(entry["dtype"]) for entry in header.values()} - DTYPES.keys())
    if unknown:
        raise UnreadableFile(f"holds tensors of dtype {', '.join(unknown)}, which this library cannot read")
    return {
        key: Tensor(path, key, tuple(entry["shape"]), DTYPES[entry["dtype"]], 8 + length + entry["data_offsets"][0])
        for key, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"])
    }
