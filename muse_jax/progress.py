"""A progress bar of bytes for people at a terminal."""

import contextlib
import time
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn


def size(count: float) -> str:
    """'23.7 MB': decimal units, as disks and models are measured."""
    value, unit = float(count), "B"
    for larger in ("kB", "MB", "GB", "TB"):
        if abs(value) < 1000:
            break
        value, unit = value / 1000, larger
    return f"{count:.0f} B" if unit == "B" else f"{value:.1f} {unit}"


def rate(count: float, seconds: float) -> str:
    """'23.7 MB in 0.4 s (59.3 MB/s)'."""
    return f"{size(count)} in {seconds:.1f} s ({size(count / max(seconds, 1e-9))}/s)"


@contextlib.contextmanager
def progress_bar(console: Console, label: str, done: str) -> Iterator[Callable[[int, int], None]]:
    """Yields a function of (bytes done, bytes in all); it shows them with the rate and the time left.

    The bar is for terminals and goes away; then one line says `done`, the bytes since the first call, time and rate.
    """
    columns = (
        TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn(),
    )  # fmt: skip
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(label, total=None)
        calls: list[tuple[int, float]] = []

        def show(now: int, total: int) -> None:
            if not calls:  # what earlier runs did is no progress of this one
                bar.reset(task, total=total, completed=now)
            calls.append((now, time.monotonic()))
            bar.update(task, completed=now)

        yield show
    if calls:
        (start, begin), (now, end) = calls[0], calls[-1]
        console.print(f"{done} {rate(now - start, end - begin)}")
