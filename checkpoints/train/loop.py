"""The loop around a training step, for target and drafter: checkpoints, time limit, log, plot, progress.

A run ends before its time limit, and the same command goes on where it was: what a step sees is a function of its
number, so that a training in many runs has the bits of an uninterrupted one.
"""

import argparse
import collections
import csv
import dataclasses
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import jax
import numpy as np
import orbax.checkpoint as ocp
from matplotlib.figure import Figure
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

STARTED = time.monotonic()
"""Time limits count from here: a run's imports and compilation are part of it."""
AHEAD = 16
"""Steps that are given to the device before the host looks at the first one's metrics."""
EVERY = 50
"""Steps between two lines of the log that are printed."""
SAVE_EVERY = 500
RESERVE = 20
"""Seconds for saving at the end of a run."""

Step = Callable[[Any, Any], tuple[Any, dict[str, jax.Array]]]
Recipe = TypeVar("Recipe")


def add_arguments(parser: argparse.ArgumentParser, recipe: type[Any]) -> None:
    """The folder to train in, the time limit, and an option for each field of a recipe (a dataclass)."""
    parser.add_argument("out", type=Path, help="folder, new or of an earlier run with the same settings")
    parser.add_argument("--minutes", type=float, default=8, help="limit of this run, compilation counted")
    for field in dataclasses.fields(recipe):
        parser.add_argument(f"--{field.name.replace('_', '-')}", type=type(field.default), default=field.default)


def settled(args: argparse.Namespace, recipe: Callable[..., Recipe]) -> Recipe:
    """The recipe that was given; kept in the folder, because runs of one training must have the same.

    Compiled programs are kept there too: later runs begin sooner.
    """
    made: Any = recipe(**{field.name: getattr(args, field.name) for field in dataclasses.fields(recipe)})  # type: ignore
    file, text = args.out / "recipe.json", json.dumps(dataclasses.asdict(made), indent=1) + "\n"
    if file.exists() and file.read_text(encoding="utf-8") != text:
        sys.exit(f"{file}: an earlier run had other settings; use the same ones, or another folder")
    args.out.mkdir(parents=True, exist_ok=True)
    file.write_text(text, encoding="utf-8")
    jax.config.update("jax_compilation_cache_dir", str((args.out / "compiled").absolute()))
    return made


class Windows:
    """Where in N token ids the rows of each step begin: all N once per epoch, in an order of its own."""

    def __init__(self, count: int, length: int, batch: int, seed: int):
        """Rows of `length` ids, `batch` of them per step. What does not fill a row is left out, elsewhere each time.

        Raises:
            ValueError: there are fewer ids than one step needs.
        """
        self._rows = count // length
        if self._rows < batch:
            raise ValueError(f"a step needs {batch} rows of {length} ids, given: {count} ids")
        self._count, self._length, self._batch, self._seed = count, length, batch, seed
        self.per_epoch = self._rows // batch
        self._epoch = -1, np.zeros(0, np.int32)

    def __call__(self, step: int) -> np.ndarray:
        """int32 [batch]: first ids of the rows of step 0, 1, ..."""
        epoch, index = divmod(step, self.per_epoch)
        if self._epoch[0] != epoch:
            rng = np.random.default_rng((self._seed, epoch))
            shift = rng.integers(0, self._count % self._length, endpoint=True)
            self._epoch = epoch, (shift + rng.permutation(self._rows) * self._length).astype(np.int32)
        return self._epoch[1][index * self._batch : (index + 1) * self._batch]


def train(
    folder: Path, state: Any, step: Step, batches: Callable[[int], Any], *, steps: int, minutes: float,
    tokens: int, evaluate: Callable[[Any], dict[str, jax.Array]], evaluate_every: int,
) -> tuple[Any, int]:  # fmt: skip
    """Trains up to step `steps`, or for as long as there is time; at least one step.

    Args:
        folder: gets `state/` (Orbax), `log.csv` and `loss.png`; what is there already is gone on with.
        state: at step 0, with the shardings that it is to have. Donated to `step`.
        step: (state, batch) -> (state, scalars by name); "loss" is one of them.
        batches: of step 0, 1, ...: arrays, from the number alone.
        minutes: of this process, from its start.
        tokens: of one step, for the rate that is shown.
        evaluate: scalars by name for the log, every `evaluate_every` steps and after the last one.

    Returns:
        (state, steps that it has behind it, those of earlier runs included).
    """
    folder.mkdir(parents=True, exist_ok=True)
    options = ocp.CheckpointManagerOptions(max_to_keep=2)
    with ocp.CheckpointManager((folder / "state").absolute(), options=options) as manager:
        done = manager.latest_step() or 0
        if done:
            shapes = jax.tree.map(ocp.utils.to_shape_dtype_struct, state)
            state = manager.restore(done, args=ocp.args.StandardRestore(shapes))
        history = _History(folder / "log.csv", done)
        with _Display(done, steps, tokens) as display:
            waiting: collections.deque[tuple[int, dict[str, jax.Array]]] = collections.deque()

            def look(at_most: int) -> None:
                while len(waiting) > at_most:
                    number, metrics = waiting.popleft()
                    values = {name: float(value) for name, value in jax.device_get(metrics).items()}
                    history.add(number, values)
                    display.show(number, values)

            def save() -> None:
                look(0)
                history.write()
                manager.save(done, args=ocp.args.StandardSave(state))

            first = done
            while done < steps and (done == first or display.seconds_left(minutes) > RESERVE):
                state, metrics = step(state, batches(done))
                done += 1
                if done % evaluate_every == 0 or done == steps:
                    metrics |= evaluate(state)
                waiting.append((done, metrics))
                look(AHEAD)
                if done % SAVE_EVERY == 0 and done < steps:
                    save()
            if done > first:
                save()
                manager.wait_until_finished()
                history.plot(folder / "loss.png")
    return state, done


def tell(model: Path, done: int, steps: int) -> None:
    """How far a training has come; "finished" is what people wait for."""
    print(f"{model}: after {done} of {steps} steps" + (", finished" if done == steps else ""))


class _History:
    """Every step's metrics, on the disk as a table."""

    def __init__(self, path: Path, done: int):
        self._path = path
        self._rows: list[dict[str, float]] = []
        if done:
            with path.open(newline="", encoding="utf-8") as file:
                rows = ({name: float(text) for name, text in row.items() if text} for row in csv.DictReader(file))
                self._rows = [row | {"step": int(row["step"])} for row in rows][:done]  # later ones were not saved

    def add(self, step: int, values: dict[str, float]) -> None:
        self._rows.append({"step": step, **values})

    def write(self) -> None:
        names = list(dict.fromkeys(name for row in self._rows for name in row))
        partial = self._path.with_suffix(".partial")
        with partial.open("w", newline="", encoding="utf-8") as file:
            table = csv.DictWriter(file, names)
            table.writeheader()
            table.writerows(self._rows)
        partial.replace(self._path)

    def plot(self, path: Path) -> None:
        figure = Figure(figsize=(7, 4), layout="constrained")
        axes = figure.add_subplot(xlabel="step", ylabel="nats per token")
        for name in ("loss", "held_out"):
            points = [(row["step"], row[name]) for row in self._rows if name in row]
            axes.plot(*np.array(points).T.reshape(2, -1), label=name.replace("_", " "), linewidth=1)
        axes.legend()
        axes.grid(alpha=0.3)
        figure.savefig(path, dpi=100)


class _Display:
    """A bar for people at a terminal, a line every so many steps elsewhere."""

    def __init__(self, done: int, steps: int, tokens: int):
        console = Console()
        columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
        self._bar = Progress(*columns, console=console, disable=not console.is_terminal)
        self._task = self._bar.add_task("compiling", total=steps, completed=done)
        self._steps, self._tokens, self._begin = steps, tokens, (done, time.monotonic())
        self._seen: collections.deque[tuple[int, float]] = collections.deque(maxlen=EVERY)

    def __enter__(self) -> "_Display":
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def show(self, step: int, values: dict[str, float]) -> None:
        """Metrics of a step that has ended."""
        self._seen.append((step, time.monotonic()))
        text = f"loss {values['loss']:.3f}"
        if (pace := self._pace()) is not None:
            text += f", {self._tokens / pace:,.0f} tokens/s"
        self._bar.update(self._task, completed=step, description=text)
        if not self._bar.disable or (step % EVERY and "held_out" not in values):
            return
        more = ", ".join(f"{name} {value:.4g}" for name, value in values.items() if name != "loss")
        print(f"{_minutes()} min, step {step} of {self._steps}: {text}, {more}", flush=True)

    def seconds_left(self, minutes: float) -> float:
        """Until the limit, when the steps that the device was given have ended."""
        return STARTED + 60 * minutes - time.monotonic() - (AHEAD + 1) * (self._pace() or 0.0)

    def _pace(self) -> float | None:
        """Seconds per step, of the last ones."""
        if len(self._seen) < 2:
            return None
        (first, begin), (last, end) = self._seen[0], self._seen[-1]
        return (end - begin) / (last - first)


def _minutes() -> str:
    return f"{(time.monotonic() - STARTED) / 60:.1f}"
