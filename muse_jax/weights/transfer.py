"""Parameters on their way from one form to another, in pieces of rows, so that memory never holds a whole layer."""

import os
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple, Protocol

import jax
import numpy as np
from tokenizers import Tokenizer

from muse_jax.config import MuseSparkConfig
from muse_jax.mesh import RANKS
from muse_jax.tokenizer import TOKENIZER_FILE
from muse_jax.weights.folders import new_folder
from muse_jax.weights.hf_names import HEAD
from muse_jax.weights.names import ParamSpec
from muse_jax.weights.safetensors_file import UnreadableFile

PIECE_BYTES = 128 << 20
_WHOLE_BYTES = 1 << 20  # smaller arrays are one piece, whatever rank their rows belong to

Progress = Callable[[int, int], None]
"""Called with (bytes done, bytes in all) now and then, from one thread."""


class Source(Protocol):
    """A complete set of parameters that can be read in pieces, from several threads at once."""

    @property
    def config(self) -> MuseSparkConfig:
        """The model."""
        ...

    @property
    def specs(self) -> Mapping[str, ParamSpec]:
        """The parameters, as `rows` gives them."""
        ...

    @property
    def problems(self) -> list[str]:
        """What is wrong with the values of the rows read so far."""
        ...

    def rows(self, name: str, start: int, stop: int) -> np.ndarray:
        """Rows [stop - start, ...] of a parameter, not to be written to.

        Raises:
            UnreadableFile: says which file cannot be read, and why.
        """
        ...


class Files(Source, Protocol):
    """A source in files."""

    def files(self, name: str) -> list[Path]:
        """Those that hold a parameter."""
        ...


class Target(Protocol):
    """A checkpoint folder in the making."""

    def write(self, name: str, start: int, rows: np.ndarray) -> None:
        """Stores a piece as `pieces` cuts it; on the disk when this returns. Writing it again changes nothing."""
        ...

    def finish(self) -> None:
        """What is left to do when every piece is there."""
        ...


class Piece(NamedTuple):
    """Rows start to stop of a parameter."""

    name: str
    start: int
    stop: int


def piece_rows(spec: ParamSpec) -> int:
    """Rows of a piece: whole experts of one rank or whole heads, about `PIECE_BYTES` if one alone is not larger."""
    rows = spec.shape[0]
    row = spec.nbytes // rows
    if spec.nbytes <= _WHOLE_BYTES:
        return rows
    if spec.placement == "expert":
        share = rows // RANKS
        return next(n for n in range(share, 0, -1) if share % n == 0 and (n * row <= PIECE_BYTES or n == 1))
    even = -(-rows // -(-spec.nbytes // PIECE_BYTES))
    return min(-(-even // HEAD) * HEAD, rows)


def pieces(specs: Mapping[str, ParamSpec]) -> Iterator[Piece]:
    """All parameters in pieces, in order."""
    for name, spec in specs.items():
        step = piece_rows(spec)
        for start in range(0, spec.shape[0], step):
            yield Piece(name, start, min(start + step, spec.shape[0]))


def piece_bytes(specs: Mapping[str, ParamSpec], piece: Piece) -> int:
    """Bytes of a piece."""
    spec = specs[piece.name]
    return spec.nbytes // spec.shape[0] * (piece.stop - piece.start)


def transfer(
    source: Source, target: Target, *, done: Collection[Piece] = (), record: Callable[[Piece], None] | None = None,
    progress: Progress | None = None,
) -> list[str]:  # fmt: skip
    """Reads every piece that is not `done` and writes it; reading and writing overlap.

    After the first problem nothing more is written, but the rest is still read to find all problems.

    Args:
        record: called after a piece is on the disk.

    Returns:
        The problems of unreadable or impossible values; empty if the target is complete.
    """
    total = sum(spec.nbytes for spec in source.specs.values())
    passed = sum(piece_bytes(source.specs, piece) for piece in done)
    unreadable: list[str] = []

    def report() -> None:
        if progress is not None:
            progress(passed, total)

    def store(piece: Piece, rows: np.ndarray) -> None:
        target.write(piece.name, piece.start, rows)
        if record is not None:
            record(piece)

    report()
    with ThreadPoolExecutor(1) as writer:
        writing: Future[None] | None = None
        for piece in pieces(source.specs):
            if piece in done:
                continue
            rows = None
            try:
                rows = source.rows(*piece)
            except UnreadableFile as error:
                unreadable.append(str(error))
            if writing is not None:
                writing.result()  # at most one piece waits while the next is read
            if rows is not None and not unreadable and not source.problems:
                writing = writer.submit(store, piece, rows)
            del rows
            passed += piece_bytes(source.specs, piece)
            report()
        if writing is not None:
            writing.result()
    return [*dict.fromkeys(unreadable), *source.problems]


class ParamsSource:
    """Parameters that are on devices."""

    problems: list[str] = []  # noqa: RUF012  (nothing is looked for: what was computed is saved as it is)

    def __init__(self, config: MuseSparkConfig, specs: Mapping[str, ParamSpec], params: Mapping[str, jax.Array]):
        """`params` fit `specs`."""
        self.config, self.specs = config, specs
        self._params = params
        self._host: tuple[object, int, np.ndarray] | None = None

    def rows(self, name: str, start: int, stop: int) -> np.ndarray:
        """From the shard that has them; its copy on the host is kept until another one is asked for."""
        array = self._params[name]
        if not isinstance(array, jax.Array):
            return np.asarray(array)[start:stop]
        for shard in array.addressable_shards:
            first, last, _ = shard.index[0].indices(array.shape[0])
            if first <= start and stop <= last and all(i == slice(None) for i in shard.index[1:]):
                if self._host is None or self._host[:2] != (name, first):
                    self._host = (name, first, np.asarray(shard.data))
                return self._host[2][start - first : stop - first]
        return np.asarray(array)[start:stop]


def write_folder(
    path: "str | os.PathLike[str]", source: ParamsSource, make: Callable[[Path], Target], tokenizer: Tokenizer | None,
    overwrite: bool,
) -> None:  # fmt: skip
    """A whole checkpoint folder at once, in the form of `make(folder)`; it has its name when it is complete."""
    with new_folder(path, overwrite) as partial:
        if tokenizer is not None:
            (partial / TOKENIZER_FILE).write_text(tokenizer.to_str(pretty=True), encoding="utf-8")
        target = make(partial)
        transfer(source, target)
        target.finish()
