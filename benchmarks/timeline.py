"""Where the time of a decode step goes, from clock stamps inside the kernel.

    pip install -C cmake.define.MUSE_TIMELINE=ON .
    python benchmarks/timeline.py [--case 16:52:1k] [--layers 62] [--output timeline]

Needs a build with MUSE_TIMELINE, as above; others carry no stamps and this says so. Runs one case of decode_step.py
(one rank of eight, its peers played by itself; the layers alone) and reads the stamps of the loop's last step. Writes

    timeline.trace.json.gz   for https://ui.perfetto.dev or chrome://tracing: one track per block of the kernel
    timeline.json            the table
    timeline.png             the table as bars: work and waiting, phase by phase

Every block stamps the end of each phase (names: enum Mark in ffi/decode/cuda/step.cuh; 1 and 2 are a name's first and
second time in a layer, in the attention branch and in the MoE) and of the barrier of all blocks that may follow. What a
phase waits for inside, weights or slots of an exchange, counts as its work.
"""

import argparse
import importlib
import re
from pathlib import Path
from typing import Any

import jax
import numpy as np
from one_rank import one_rank
from stamps import Stamps, phase_table, write_trace
from stepping import (
    LOOPBACK,
    RELEASED_LAYERS,
    Case,
    Steps,
    describe,
    gpus,
    layer_count,
    released_config,
    share,
    step_count,
    write_json,
)
from verdict import verdict

from muse_jax import guarantee

MARKS_SOURCE = Path(__file__).parents[1] / "ffi" / "decode" / "cuda" / "step.cuh"
BLOCKS = 132  # kTimelineBlocks in ffi/decode/workspace.h
HOW = "reinstall it with: pip install -C cmake.define.MUSE_TIMELINE=ON ."


def mark_names(source: str) -> list[str]:
    """The names of `enum class Mark` in its order: kWait is "wait"."""
    body = re.search(r"enum class Mark\b[^{]*\{([^}]*)\}", re.sub(r"//[^\n]*", "", source))
    if body is None:
        raise SystemExit(f"{MARKS_SOURCE} has no enum Mark: is this script beside the sources of the build?")
    return [name[0].lower() + name[1:] for name in re.findall(r"\bk([A-Z]\w*)", body.group(1))]


def reader() -> Any:
    """The compiled module, if it can tell the time."""
    try:
        cuda = importlib.import_module("muse_jax._cuda")
    except ImportError:
        raise SystemExit("this muse-jax was built without CUDA; " + HOW) from None
    if not hasattr(cuda, "timeline"):
        raise SystemExit("this build carries no stamps (MUSE_TIMELINE is OFF); " + HOW)
    return cuda


def print_table(table: list[dict[str, Any]], total: float, step_us: float, layers: int) -> None:
    """Microseconds per layer by phase."""
    print(f"\n{'microseconds per layer':24}{'mean block':>12}{'slowest':>10}{'lost at the barrier after it':>31}")
    for line in table:
        lost = f"{line['lost']:31.2f}" if line["barrier"] else f"{'no barrier':>31}"
        print(f"  {line['phase']:22}{line['mean']:12.2f}{line['slowest']:10.2f}{lost}")
    work, lost = (sum(line[k] for line in table) for k in ("mean", "lost"))
    print(f"  {'together':22}{work:12.2f}{'':10}{lost:31.2f}")
    print(
        f"work {work:.2f} + lost {lost:.2f} = {work + lost:.2f} us per layer; the whole launch, with start and end, "
        f"{total / layers:.2f}; the measured step {step_us / layers:.2f}"
    )


def draw(table: list[dict[str, Any]], title: str, path: Path) -> None:
    """Stacked bars: each phase's work, and the waiting after it."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        print(f"no {path}: matplotlib is not installed")
        return
    figure = Figure(figsize=(9, 1.8 + 0.36 * len(table)), layout="constrained")
    axes, y = figure.subplots(), np.arange(len(table))
    mean, lost, slowest = (np.array([line[k] for line in table]) for k in ("mean", "lost", "slowest"))
    axes.barh(y, mean, color="tab:blue", label="work, mean over blocks")
    axes.barh(y, lost, left=mean, color="tab:red", label="waiting at the barrier after it")
    axes.plot(slowest, y, "k|", markersize=9, label="work of the slowest block")
    axes.set_yticks(y, [line["phase"] for line in table])
    axes.invert_yaxis()
    axes.set_xlabel("microseconds per layer")
    axes.set_title(title)
    axes.legend()
    figure.savefig(path, dpi=150)
    print(f"written: {path}")


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", type=Case.parse, default=Case(16, 52, 1024), metavar="ROWS:CANDIDATES:CONTEXT")
    parser.add_argument("--layers", type=layer_count, default=RELEASED_LAYERS)
    parser.add_argument("--steps", type=step_count, default=16, help="steps of a loop; the last one's stamps are read")
    parser.add_argument("--repeats", type=step_count, default=10, help="loops that are timed")
    parser.add_argument("--overlap", type=share, default=0.5, help="share of the candidates that stay")
    parser.add_argument("--seed", type=int, default=0, help="of the routing")
    parser.add_argument("--output", type=Path, default=Path("timeline"), help="what the three files' names begin with")
    return parser.parse_args(arguments)


def main() -> None:
    """Run the case, read the stamps, print and write."""
    options = parse()
    names, device = mark_names(MARKS_SOURCE.read_text()), gpus()[0]
    cuda, parity, config = reader(), verdict(device), released_config(options.layers)
    print(f"{device.device_kind}, jax {jax.__version__}, guarantee: {guarantee([device])}")
    print(LOOPBACK)
    print(f"parity  {parity} (this build with its stamps, 8 ranks on this GPU, a small model)", flush=True)
    weights = one_rank(config, device)
    steps = Steps(weights, options.case, steps=options.steps, overlap=options.overlap, seed=options.seed)
    distinct = float(steps.hits().sum(axis=2).mean())
    times = steps.time(options.repeats, head=False)
    step_us = times.median * 1e6
    raw = np.frombuffer(cuda.timeline(weights.communicator.key, 0), np.uint64).reshape(BLOCKS, -1)
    stamps = Stamps.decode(raw, names, step_us)

    title = f"{options.case}, {distinct:.1f} experts hit per layer; {describe(config)}"
    print(f"{title}\nlayers alone {times.median * 1e3:.3f} ms per step (spread {times.spread * 1e3:.3f}), stamps on")
    print(
        f"{stamps.blocks} blocks; {stamps.clocks_per_us:.0f} clocks per us: their mean launch is the median step\n"
        f"between two barriers a block counts at most {stamps.drift_us():.2f} us more or less than the blocks' mean"
    )
    table = phase_table(stamps, config.num_hidden_layers)
    total = stamps.launch_us()
    print_table(table, total, step_us, config.num_hidden_layers)
    write_trace(stamps, config.num_hidden_layers, options.output.with_name(options.output.name + ".trace.json.gz"))
    short = f"{options.case}, one rank of eight (peers played by itself)\n{device.device_kind}, stamps on"
    draw(table, short, options.output.with_name(options.output.name + ".png"))
    report = {
        "what": " ".join(LOOPBACK.split()), "device": device.device_kind, "case": vars(options.case),
        "layers": config.num_hidden_layers, "distinct_experts": distinct, "parity": vars(parity),
        "step_us": step_us, "spread_us": times.spread * 1e6, "launch_us": total,
        "clocks_per_us": stamps.clocks_per_us, "us_per_layer": table,
    }  # fmt: skip
    write_json(options.output.with_name(options.output.name + ".json"), report)
    if parity.differing:
        raise SystemExit("this build does not have the CPU's bits: the times above mean nothing")


if __name__ == "__main__":
    main()
