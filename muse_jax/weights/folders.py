"""Folders that appear complete or not at all."""

import contextlib
import fcntl
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from muse_jax.config_checks import as_path
from muse_jax.errors import CheckpointError

_PLAN, _NEW_PLAN, _JOURNAL, _CONTENT = "plan.json", "plan.json.new", "journal.txt", "content"


@contextlib.contextmanager
def new_folder(path: "str | os.PathLike[str]", overwrite: bool = False) -> Iterator[Path]:
    """Yields a temporary sibling of `path` to write into, and renames it to `path` if the block succeeds.

    Raises:
        CheckpointError: `path` exists already and `overwrite` is false, or the disk is full or cannot be written.
    """
    final = as_path("path", path).absolute()
    if os.path.lexists(final) and not overwrite:
        raise CheckpointError(
            f"cannot write {final}", ["exists already; choose another name, remove it, or pass overwrite=True"]
        )
    partial = final.with_name(f".{final.name}.partial-{os.getpid()}")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        final.parent.mkdir(parents=True, exist_ok=True)
        partial.mkdir()
        yield partial
        if os.path.lexists(final):
            # A folder cannot be replaced in one step; the old one keeps its content until the new one is in place.
            old = final.with_name(f".{final.name}.old-{os.getpid()}")
            os.rename(final, old)
            os.rename(partial, final)
            if old.is_dir() and not old.is_symlink():
                shutil.rmtree(old)
            else:
                old.unlink()
        else:
            os.rename(partial, final)
    except OSError as error:
        raise CheckpointError(f"cannot write {final}", [f"{error}; nothing is left of it"]) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _sync(path: Path) -> None:
    """Waits until a file or folder is on the disk; nothing to do for most of a checkpoint."""
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


class ResumableFolder:
    """A folder that grows over several runs: `.NAME.partial` beside it holds the plan, a journal and the content.

    The plan says what is being made; a run with another one is refused. The journal has a line for each part that is
    done. The content gets its name when it is complete. One process at a time.
    """

    def __init__(self, path: "str | os.PathLike[str]", plan: dict[str, Any]):
        """Looks at what earlier runs have left; makes nothing.

        Raises:
            CheckpointError: `path` exists already, an earlier run had another plan, or what lies beside it under the
                name of the growing folder is not one.
        """
        self.final = Path(path).absolute()
        self.partial = self.final.with_name(f".{self.final.name}.partial")
        self.content = self.partial / _CONTENT
        self._plan = json.dumps(plan, indent=1, sort_keys=True) + "\n"
        self._journal = self.partial / _JOURNAL
        headline = f"cannot write {self.final}"
        if os.path.lexists(self.partial) and (self.partial.is_symlink() or not self._is_ours()):
            reason = f"{self.partial} exists and is not what an earlier run left; move it, or choose another name"
            raise CheckpointError(headline, [reason])
        plan_file = self.partial / _PLAN
        self.begun = plan_file.exists()
        """Whether there is something to go on with."""
        self.complete = self.partial.exists() and not self.content.exists() and self.final.exists()
        """Whether the last run was stopped after it had named the content, while it cleared up."""
        if os.path.lexists(self.final) and not self.complete:
            raise CheckpointError(headline, ["exists already; choose another name, or remove it"])
        if self.begun and plan_file.read_text(encoding="utf-8") != self._plan:
            hint = "give the same source and options as then, or remove that folder to start anew"
            raise CheckpointError(headline, [f"{self.partial} was begun as another conversion; {hint}"])

    def _is_ours(self) -> bool:
        """Nothing but what runs leave, whenever they are stopped: the folder is removed at the end."""
        return self.partial.is_dir() and {*os.listdir(self.partial)} <= {_PLAN, _NEW_PLAN, _JOURNAL, _CONTENT}

    def lines(self) -> list[str]:
        """What the journal has; a line that was cut off does not count."""
        if not self.begun or not self._journal.exists():
            return []
        return [line[:-1] for line in self._journal.open(encoding="utf-8") if line.endswith("\n")]

    @contextlib.contextmanager
    def open(self) -> Iterator["ResumableFolder"]:
        """Makes or goes on with the content; whatever happens in the block, it stays for the next run.

        Raises:
            CheckpointError: another process is at it.
        """
        (self.partial if self.complete else self.content).mkdir(parents=True, exist_ok=True)
        lock = os.open(self.partial, os.O_RDONLY)
        try:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                reason = f"another process is writing {self.partial}; wait for it, or stop it"
                raise CheckpointError(f"cannot write {self.final}", [reason]) from None
            if not self.begun and not self.complete:
                partial_plan = self.partial / _NEW_PLAN
                partial_plan.write_text(self._plan, encoding="utf-8")
                os.replace(partial_plan, self.partial / _PLAN)
            elif self._journal.exists():
                whole = "".join(f"{line}\n" for line in self.lines()).encode()
                os.truncate(self._journal, len(whole))  # so that the next line does not continue one that was cut off
            yield self
        finally:
            os.close(lock)

    def record(self, line: str) -> None:
        """Adds a line to the journal; on the disk when this returns."""
        with self._journal.open("a", encoding="utf-8") as journal:
            journal.write(f"{line}\n")
            journal.flush()
            os.fsync(journal.fileno())

    def finish(self) -> None:
        """Gives the content its name, unless the last run did."""
        if not self.complete:
            for path in (self.content, *self.content.rglob("*")):
                _sync(path)
            os.rename(self.content, self.final)
            _sync(self.final.parent)
        shutil.rmtree(self.partial)
