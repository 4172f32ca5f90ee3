"""One safetensors file, read and written in slices.

The safetensors library checks every file (header, sizes, overlaps). The data is read here, because the library's NumPy
reader has no float8, and written here, because the library takes whole files only.
"""

import dataclasses
import json
import math
import os
from collections.abc import Mapping
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
    """A tensor of a file; `read()` maps it, `rows()` reads some of it."""

    path: Path
    key: str
    """Its name in the file."""
    shape: tuple[int, ...]
    dtype: np.dtype
    offset: int
    metadata: Mapping[str, str]
    """Of the whole file: what its writer says about it."""

    def read(self) -> np.ndarray:
        """A read-only view of the mapped file. Copy it if it has to outlive changes to the file."""
        count = int(np.prod(self.shape, dtype=np.int64))
        if count == 0:
            return np.zeros(self.shape, self.dtype)
        size = count * self.dtype.itemsize
        raw = np.memmap(self.path, dtype=np.uint8, mode="r", offset=self.offset, shape=(size,))
        return np.asarray(raw).view(self.dtype).reshape(self.shape)

    def rows(self, start: int, stop: int) -> np.ndarray:
        """Rows start to stop of the leading axis, in memory of their own.

        Raises:
            UnreadableFile: the file has become shorter since it was opened, or cannot be read.
        """
        shape = (stop - start, *self.shape[1:])
        row = math.prod(self.shape[1:]) * self.dtype.itemsize
        size = (stop - start) * row
        try:
            raw = np.fromfile(self.path, np.uint8, size, offset=self.offset + start * row)
        except OSError as error:
            raise UnreadableFile(f"{self.path.name}: {error.strerror or error}") from error
        if raw.size != size:
            raise UnreadableFile(f"{self.path.name}: shorter than before; something writes to it, download it again")
        return raw.view(self.dtype).reshape(shape)


def open_file(path: Path) -> dict[str, Tensor]:
    """The tensors of a file, in the order of its header.

    Raises:
        UnreadableFile: missing, truncated, damaged header, or a dtype NumPy cannot hold.
    """
    if path.exists() and not path.is_file():  # a pipe would be waited for
        raise UnreadableFile("is not a file; download it again")
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
    metadata = header.pop("__metadata__", {})
    unknown = sorted({str(entry["dtype"]) for entry in header.values()} - DTYPES.keys())
    if unknown:
        raise UnreadableFile(f"holds tensors of dtype {', '.join(unknown)}, which this library cannot read")
    return {
        key: Tensor(
            path, key, tuple(entry["shape"]), DTYPES[entry["dtype"]], 8 + length + entry["data_offsets"][0], metadata
        )
        for key, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"])
    }


_TAGS = {dtype: tag for tag, dtype in DTYPES.items()}
# The library sorts tensors so, by the order of its own list of dtypes: every one is aligned. Those of our parameters.
_ORDER = ("F32", "BF16", "F8_E4M3", "U8")


class FileWriter:
    """A safetensors file whose tensors arrive in slices, in any order: byte for byte what the library would write."""

    def __init__(self, path: Path, tensors: Mapping[str, Any], metadata: Mapping[str, str]):
        """Makes the file with its header and its full size, or opens it to go on.

        Args:
            tensors: name -> something with shape and dtype (fp32, bf16, e4m3 or uint8).
            metadata: about the whole file.
        """
        self._path = path
        self._rows: dict[str, tuple[int, int]] = {}
        header: dict[str, Any] = {"__metadata__": dict(metadata)}
        offset = 0
        for key in sorted(tensors, key=lambda key: (_ORDER.index(_TAGS[tensors[key].dtype]), key)):
            shape, dtype = tensors[key].shape, tensors[key].dtype
            size = math.prod(shape) * dtype.itemsize
            header[key] = {"dtype": _TAGS[dtype], "shape": list(shape), "data_offsets": [offset, offset + size]}
            self._rows[key] = offset, size // shape[0]
            offset += size
        text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
        text += b" " * (-len(text) % 8)
        self._start = 8 + len(text)
        with path.open("r+b" if path.exists() else "x+b") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            file.truncate(self._start + offset)

    def write(self, key: str, start: int, rows: np.ndarray) -> None:
        """Rows from `start` on of a tensor; on the disk when this returns."""
        offset, row = self._rows[key]
        with self._path.open("r+b") as file:
            file.seek(self._start + offset + start * row)
            file.write(np.ascontiguousarray(rows).reshape(-1).view(np.uint8).data)
            file.flush()
            os.fsync(file.fileno())
