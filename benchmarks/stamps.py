"""The stamps of a kernel built with MUSE_TIMELINE: decoded, aligned, as a table and as a trace. Used by timeline.py."""

import dataclasses
import gzip
import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np

WAIT, START = "wait", "start"


@dataclasses.dataclass(frozen=True)
class Stamps:
    """What every block stamped, in its own multiprocessor's clock; all blocks pass the same marks in the same order."""

    marks: list[str]
    """[events]: what ended; "wait" is the barrier after the phase before it."""
    clocks: np.ndarray
    """int64 [blocks, events]."""
    clocks_per_us: float

    @classmethod
    def decode(cls, raw: np.ndarray, names: list[str], launch_us: float) -> "Stamps":
        """uint64 [blocks, events] as `_cuda.timeline` gives them: clock << 8 | mark, 0 where there is none.

        `launch_us`: how long the blocks' mean way from the first stamp to the last took.
        """
        used = raw[raw[:, 0] != 0]
        if not len(used):
            raise SystemExit("no block left a stamp: did a step run since the stamps were last read?")
        counts = (used != 0).sum(axis=1)
        kinds = (used & 255).astype(np.int64)
        if (counts != counts[0]).any() or (kinds != kinds[0]).any():
            raise SystemExit("the blocks do not pass the same marks: cannot lay them side by side")
        events = int(counts[0])
        if events == raw.shape[1]:
            print(f"WARNING: all {events} places for stamps are taken; the end of the step may be missing")
        if kinds[0, :events].max() >= len(names):
            raise SystemExit("a mark has no name in enum Mark: the build is of other sources than these")
        clocks = (used[:, :events] >> 8).astype(np.int64)
        if (np.diff(clocks, axis=1) < 0).any():
            raise SystemExit("a block's clock runs backwards: stamps of two launches are mixed")
        per_us = float((clocks[:, -1] - clocks[:, 0]).mean()) / launch_us
        return cls([names[k] for k in kinds[0, :events]], clocks, per_us)

    @property
    def blocks(self) -> int:
        """How many blocks left stamps."""
        return len(self.clocks)

    def launch_us(self) -> float:
        """From the first stamp to the last, mean over the blocks."""
        return float((self.clocks[:, -1] - self.clocks[:, 0]).mean()) / self.clocks_per_us

    def barriers(self) -> np.ndarray:
        """Events at which all blocks are at one time: the ends of barriers."""
        return np.flatnonzero(np.array(self.marks) == WAIT)

    def drift_us(self) -> float:
        """The largest deviation of a block's time between two barriers from the blocks' mean: what alignment hides."""
        at = self.clocks[:, self.barriers()]
        if at.shape[1] < 2:
            return 0.0
        between = np.diff(at, axis=1)
        return float(np.abs(between - between.mean(axis=0)).max()) / self.clocks_per_us

    def aligned_us(self) -> np.ndarray:
        """float64 [blocks, events]: microseconds on one common clock, the earliest stamp at 0.

        Every block's end of a barrier is put at the same time; between two barriers a block's stamps are stretched by
        what its clock differs from the blocks' mean, before the first and after the last they are only shifted.
        """
        at = self.barriers()
        clocks = self.clocks.astype(np.float64)
        if not len(at):
            aligned = clocks - clocks[:, :1]
        else:
            aligned = np.empty_like(clocks)
            anchor = 0.0
            aligned[:, : at[0] + 1] = clocks[:, : at[0] + 1] - clocks[:, at[0], None]
            for begin, end in itertools.pairwise(at):
                since = clocks[:, begin + 1 : end + 1] - clocks[:, begin, None]
                length = since[:, -1].mean()
                aligned[:, begin + 1 : end + 1] = anchor + since * (length / since[:, -1:])
                anchor += length
            aligned[:, at[-1] + 1 :] = anchor + clocks[:, at[-1] + 1 :] - clocks[:, at[-1], None]
        return (aligned - aligned.min()) / self.clocks_per_us

    def layer_events(self, layers: int) -> np.ndarray:
        """int [layers, events of a layer]: the events between the start and the step's last barrier."""
        first = self.marks.index(START) + 1 if START in self.marks else 0
        last = len(self.marks) - (self.marks[-1] == WAIT)
        period, rest = divmod(last - first, layers)
        events = np.arange(first, first + period * layers).reshape(layers, period)
        if rest or any([self.marks[e] for e in row] != [self.marks[e] for e in events[0]] for row in events):
            raise SystemExit(f"{last - first} marks do not make {layers} equal layers")
        return events

    def phase_names(self, layers: int) -> list[str]:
        """Of each event of a layer; a name that comes again is numbered. A barrier is named after the phase before."""
        marks = [self.marks[e] for e in self.layer_events(layers)[0]]
        names: list[str] = []
        for i, mark in enumerate(marks):
            names.append(f"{mark} {marks[: i + 1].count(mark)}" if mark != WAIT and marks.count(mark) > 1 else mark)
        return [f"{WAIT} after {names[i - 1]}" if name == WAIT else name for i, name in enumerate(names)]


def phase_table(stamps: Stamps, layers: int) -> list[dict[str, Any]]:
    """Microseconds per layer of every phase, the mean over the layers, in the layer's order.

    phase; mean: over the blocks; slowest: the mean over the layers of the slowest block's; lost: the blocks' mean wait
    at the barrier right after it; barrier: whether there is one.
    """
    events, names = stamps.layer_events(layers), stamps.phase_names(layers)
    durations = np.diff(stamps.clocks, axis=1, prepend=stamps.clocks[:, :1]) / stamps.clocks_per_us
    table: list[dict[str, Any]] = []
    leading = [0.0, False]  # a barrier that begins the layer belongs to the layer's last phase
    for i, name in enumerate(names):
        spent = durations[:, events[:, i]]  # [blocks, layers]
        if not name.startswith(WAIT):
            mean, slowest = float(spent.mean()), float(spent.max(axis=0).mean())
            table.append({"phase": name, "mean": mean, "slowest": slowest, "lost": 0.0, "barrier": False})
        elif table:
            table[-1]["lost"] += float(spent.mean())
            table[-1]["barrier"] = True
        else:
            leading = [leading[0] + float(spent.mean()), True]
    if leading[1] and table:
        table[-1]["lost"] += leading[0]
        table[-1]["barrier"] = True
    return table


def trace(stamps: Stamps, layers: int) -> dict[str, Any]:
    """The Chrome trace format that Perfetto reads: one track per block, one slice per phase and wait."""
    at = stamps.aligned_us().round(3)
    labels = [(mark, "") for mark in stamps.marks]
    names = stamps.phase_names(layers)
    for layer, row in enumerate(stamps.layer_events(layers)):
        for event, name in zip(row, names, strict=True):
            labels[event] = (name, str(layer))
    slices: list[dict[str, Any]] = [
        {"ph": "M", "name": "process_name", "pid": 0, "args": {"name": "one rank of eight, peers played by itself"}}
    ]
    for block in range(stamps.blocks):
        slices.append({"ph": "M", "name": "thread_name", "pid": 0, "tid": block, "args": {"name": f"block {block}"}})
        slices.append({"ph": "M", "name": "thread_sort_index", "pid": 0, "tid": block, "args": {"sort_index": block}})
        begins, ends = at[block, :-1].tolist(), at[block, 1:].tolist()
        for begin, end, (name, layer) in zip(begins, ends, labels[1:], strict=True):
            one = {"ph": "X", "name": name, "pid": 0, "tid": block, "ts": begin, "dur": round(end - begin, 3)}
            slices.append(one | ({"args": {"layer": int(layer)}} if layer else {}))
    return {"traceEvents": slices, "displayTimeUnit": "ns"}


def write_trace(stamps: Stamps, layers: int, path: Path) -> None:
    """Write the trace, compressed (Perfetto reads it so), and say where."""
    with gzip.open(path, "wt", compresslevel=6) as file:
        json.dump(trace(stamps, layers), file, separators=(",", ":"))
    print(f"written: {path} ({path.stat().st_size / 1e6:.1f} MB; open it in https://ui.perfetto.dev)")
