"""How long a decode step takes at the released shapes, beside its memory floor and its parity verdict.

    python benchmarks/decode_step.py [--cases 16:52:1k 1:8:128k ...] [--layers N] [--json FILE]

ONE rank of eight on one GPU, all 62 layers with their own weights (67 GB, made on the device). Its seven peers are
played by itself, so that no link is crossed: a benchmark's numbers. A case is rows:candidates:context; the routing of
every layer and step is drawn anew, with a stated overlap, so that 16 rows hit about 49 experts of a layer. Each case is
timed twice: the layers alone (run_layers), and the full step (run_step).

The floor is what the step must read (dense weights, weights of the experts really hit, KV, the vocabulary's weights)
over the reading bandwidth measured in the same run (read_bandwidth.cu). `--json FILE` also draws a PNG beside it.

    python benchmarks/decode_step.py --all-ranks [--layers 2] [--json FILE]

Instead eight real ranks on the GPUs at hand (one or more), a few layers: what exchanges between GPUs cost.
"""

import argparse
import time
from pathlib import Path
from typing import Any

import all_ranks
import jax
import numpy as np
from bandwidth import Bandwidth, measure
from one_rank import one_rank
from stepping import (
    CASES,
    LOOPBACK,
    RELEASED_LAYERS,
    Case,
    Steps,
    describe,
    gpus,
    layer_count,
    released_config,
    reuse,
    share,
    step_count,
    write_json,
)
from verdict import Verdict, verdict

from muse_jax import guarantee


def measure_case(steps: Steps, ceiling: float, repeats: int) -> dict[str, Any]:
    """One case's entry of the report."""
    config, case, hits = steps.weights.config, steps.case, steps.hits()
    layers, distinct = config.num_hidden_layers, hits.sum(axis=2)
    by_kind = steps.bytes_by_kind()
    entry: dict[str, Any] = {
        "rows": case.rows, "candidates": case.candidates, "context": case.context, "steps": steps.steps,
        "overlap_of_candidates": steps.overlap,
        "distinct_experts": {
            "mean": float(distinct.mean()), "least": int(distinct.min()), "most": int(distinct.max()),
            "by_layer": distinct.mean(axis=0).round(2).tolist(), "share_hit_by_the_step_before": reuse(hits),
        },
        "bytes": by_kind,
    }  # fmt: skip
    for name, head in (("layers", False), ("step", True)):
        times = steps.time(repeats, head=head)
        floor = sum(n for kind, n in by_kind.items() if head or kind != "head") / ceiling
        entry[name] = {
            "seconds": times.median, "spread_seconds": times.spread, "floor_seconds": floor,
            "share_of_floor": floor / times.median, "us_per_layer": times.median / layers * 1e6,
        }  # fmt: skip
    return entry


def print_case(entry: dict[str, Any], layers: int) -> None:
    """One case's lines."""
    hit, case = entry["distinct_experts"], Case(entry["rows"], entry["candidates"], entry["context"])
    print(f"\n{case}; {entry['overlap_of_candidates']:.0%} of the candidates stay from step to step")
    print(
        f"  experts hit  {hit['mean']:.1f} per layer ({hit['least']} to {hit['most']}), "
        f"{hit['share_hit_by_the_step_before']:.0%} of them hit by the step before too"
    )
    kinds = ", ".join(f"{kind} {n / 1e6:,.1f} MB" for kind, n in entry["bytes"].items())
    print(f"  must read    {kinds}; together {sum(entry['bytes'].values()) / 1e9:.2f} GB")
    for name, what in (("layers", "layers alone"), ("step", "full step")):
        line = entry[name]
        print(
            f"  {what:12} {line['seconds'] * 1e3:.3f} ms (spread {line['spread_seconds'] * 1e3:.3f}), "
            f"floor {line['floor_seconds'] * 1e3:.3f} ms: {line['share_of_floor']:.0%} of the floor's speed, "
            f"{line['us_per_layer']:.1f} us per layer of {layers}",
            flush=True,
        )


def draw(report: dict[str, Any], path: Path) -> None:
    """Bars: the floor by kind of byte, and the measured step."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        print(f"no {path}: matplotlib is not installed")
        return
    cases, ceiling = report["cases"], report["bandwidth"]["bytes_per_second"]
    figure = Figure(figsize=(2.2 + 1.6 * len(cases), 5), layout="constrained")
    axes, x = figure.subplots(), np.arange(len(cases))
    bottom = np.zeros(len(cases))
    for kind in cases[0]["bytes"]:
        height = np.array([case["bytes"][kind] / ceiling * 1e3 for case in cases])
        axes.bar(x - 0.2, height, 0.36, bottom, label=f"floor: {kind}")
        bottom += height
    measured = [case["step"]["seconds"] * 1e3 for case in cases]
    bars = axes.bar(x + 0.2, measured, 0.36, color="0.35", label="measured")
    axes.bar_label(bars, [f"{case['step']['share_of_floor']:.0%}" for case in cases])
    axes.set_xticks(x, [f"{case['rows']}\n{case['context']:,}" for case in cases])
    axes.set_xlabel("rows and, below, context")
    axes.set_ylabel("ms per step, with the head")
    axes.set_title(
        f"Decode step, one rank of eight (peers played by itself)\n"
        f"{report['device']}, {report['layers']} layers, ceiling {ceiling / 1e12:.2f} TB/s"
    )
    axes.legend()
    figure.savefig(path, dpi=150)
    print(f"written: {path}")


def print_header(device: Any, bandwidth: Bandwidth, parity: Verdict) -> None:
    """What all cases share."""
    print(f"{device.device_kind}, jax {jax.__version__}, guarantee: {guarantee([device])}")
    print(LOOPBACK)
    print(f"reading ceiling  {bandwidth}")
    print(f"parity           {parity} (this build, 8 ranks on this GPU, a small model)", flush=True)


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Measure and print; the report."""
    device = gpus()[0]
    bandwidth, parity = measure(device), verdict(device)
    print_header(device, bandwidth, parity)
    config = released_config(options.layers)
    begin = time.perf_counter()
    weights = jax.block_until_ready(one_rank(config, device))
    size = sum(x.nbytes for x in jax.tree.leaves(weights))
    print(f"weights          {describe(config)}: {size / 1e9:.1f} GB in {time.perf_counter() - begin:.1f} s")
    print(
        f"times            medians of {options.repeats} loops of {options.steps} steps, per step; "
        "spread: slowest less fastest loop",
        flush=True,
    )
    entries = []
    for case in options.cases:
        steps = Steps(weights, case, steps=options.steps, overlap=options.overlap, seed=options.seed)
        entries.append(measure_case(steps, bandwidth.bytes_per_second, options.repeats))
        print_case(entries[-1], config.num_hidden_layers)
    return {
        "what": " ".join(LOOPBACK.split()), "device": device.device_kind, "jax": jax.__version__,
        "layers": config.num_hidden_layers, "weights": describe(config), "seed": options.seed,
        "bandwidth": vars(bandwidth), "parity": vars(parity), "cases": entries,
    }  # fmt: skip


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=Case.parse, nargs="+", default=CASES, metavar="ROWS:CANDIDATES:CONTEXT")
    parser.add_argument("--layers", type=layer_count, help="default: 62, with --all-ranks 2")
    parser.add_argument("--steps", type=step_count, default=16, help="steps of a loop, each with its own routing")
    parser.add_argument("--repeats", type=step_count, default=10, help="loops that are timed")
    parser.add_argument("--overlap", type=share, default=0.5, help="share of the candidates that stay")
    parser.add_argument("--seed", type=int, default=0, help="of the routing")
    parser.add_argument("--all-ranks", action="store_true", help="eight real ranks on the GPUs at hand, few layers")
    parser.add_argument("--json", type=Path, help="also write the figures here and a PNG beside it")
    options = parser.parse_args(arguments)
    if options.layers is None:
        options.layers = all_ranks.LAYERS if options.all_ranks else RELEASED_LAYERS
    return options


def main() -> None:
    """Run, print, write."""
    options = parse()
    if options.all_ranks:
        report = all_ranks.run(options.layers, options.steps, options.repeats)
    else:
        report = run(options)
        if options.json:
            draw(report, options.json.with_suffix(".png"))
    if options.json:
        write_json(options.json, report)
    if report["parity"]["differing"]:
        raise SystemExit("this build does not have the CPU's bits: the times above mean nothing")


if __name__ == "__main__":
    main()
