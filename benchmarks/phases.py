"""Each streaming phase of a decode step by itself: what it reads, how fast, and what the stops between them cost.

    pip install -C cmake.define.MUSE_TIMELINE=ON .
    python benchmarks/phases.py [--cases 16:52:1k 1:8:1k] [--layers 62] [--json FILE]

Needs a build with stamps, as timeline.py does, and runs its cases likewise: one rank of eight, its peers played by
itself. A phase's time is what passes in the mean block from its operand's arrival to its last result, inside the
running step (experts of NVFP4 with quantised activations wait for their tokens within it); its share is its bytes
at the reading ceiling of the same run over that time. A phase's first weights (up to 19.5 MB over all blocks) may
lie in the ring before it begins. Everything else in a layer is a stop: waiting for
other blocks, exchanges, making operands, phases that read no weights.
"""

import argparse
from pathlib import Path
from typing import Any

import jax
import numpy as np
from bandwidth import measure
from one_rank import one_rank
from stamps import Stamps, phase_table
from stepping import (
    LOOPBACK,
    RELEASED_LAYERS,
    Case,
    Steps,
    describe,
    gpus,
    layer_count,
    released_config,
    step_count,
    write_json,
)
from timeline import BLOCKS, MARKS_SOURCE, mark_names, reader
from verdict import verdict

from muse_jax import MuseSparkConfig, guarantee

CASES = [Case(16, 52, 1024), Case(1, 8, 1024)]
# The names of timeline.py, and what people call them.
PHASES = {
    "project": "q, k, v and u", "attend": "attention", "output 1": "o_proj", "pool": "pre_expert_proj, router",
    "first": "experts, first GEMM", "second": "experts, second GEMM", "output 2": "post_expert_proj",
}  # fmt: skip


def phase_bytes(config: MuseSparkConfig, by_kind: dict[str, float]) -> dict[str, float]:
    """Bytes per layer of a rank that each streaming phase reads; `by_kind` as `rank_bytes` counts a step's."""
    h, m, layers = config.hidden_size, config.moe_hidden_size, config.num_hidden_layers
    q, kv = config.attention_size // 8, config.num_key_value_heads * 8
    experts = by_kind["experts"] / layers
    read = {
        "project": 2.0 * h * (2 * q + 2 * kv), "attend": by_kind["KV"] / layers, "output 1": 2.0 * h * q,
        "pool": 2.0 * h * m / 8 + 4.0 * config.num_local_experts / 8 * h,
        "first": experts * 2 / 3, "second": experts / 3, "output 2": 2.0 * h * m / 8,
    }  # fmt: skip
    assert np.isclose(sum(read.values()) * layers, sum(n for kind, n in by_kind.items() if kind != "head"))
    return read


def measure_case(steps: Steps, cuda: Any, names: list[str], ceiling: float, repeats: int) -> dict[str, Any]:
    """One case's entry of the report."""
    config = steps.weights.config
    layers, read = config.num_hidden_layers, phase_bytes(config, steps.bytes_by_kind())
    times = steps.time(repeats, head=False)
    raw = np.frombuffer(cuda.timeline(steps.weights.communicator.key, 0), np.uint64).reshape(BLOCKS, -1)
    table = phase_table(Stamps.decode(raw, names, times.median * 1e6), layers)
    mean = {line["phase"]: line["mean"] for line in table}
    whole = sum(line["mean"] + line["lost"] for line in table)
    phases = [
        {
            "phase": PHASES[name], "bytes": n, "floor_us": n / ceiling * 1e6, "us": mean[name],
            "share_of_ceiling": n / ceiling * 1e6 / mean[name],
        }
        for name, n in read.items()
    ]  # fmt: skip
    streaming = sum(mean[name] for name in read)
    return {
        "case": vars(steps.case), "us_per_layer": whole, "step_us": times.median * 1e6, "phases": phases,
        "streaming_us": streaming, "stops_us": whole - streaming,
        "stops": {line["phase"]: line["mean"] for line in table if line["phase"] not in read}
        | {f"barrier after {line['phase']}": line["lost"] for line in table if line["barrier"]},
    }  # fmt: skip


def print_case(case: Case, entry: dict[str, Any]) -> None:
    """One case's lines."""
    print(f"\n{case}\n  {'per layer':24}{'MB':>8}{'floor, us':>11}{'us':>8}{'share':>8}")
    for line in entry["phases"]:
        print(
            f"  {line['phase']:24}{line['bytes'] / 1e6:8.1f}{line['floor_us']:11.2f}{line['us']:8.2f}"
            f"{line['share_of_ceiling']:8.0%}"
        )
    floor = sum(line["floor_us"] for line in entry["phases"])
    print(
        f"  {'all of these':24}{sum(line['bytes'] for line in entry['phases']) / 1e6:8.1f}{floor:11.2f}"
        f"{entry['streaming_us']:8.2f}{floor / entry['streaming_us']:8.0%}"
    )
    print(f"  stops {entry['stops_us']:.2f} us, the whole layer {entry['us_per_layer']:.2f}; the stops are")
    longest = sorted(entry["stops"].items(), key=lambda item: -item[1])
    print("   ", ", ".join(f"{name} {us:.1f}" for name, us in longest if us >= 0.05), flush=True)


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=Case.parse, nargs="+", default=CASES, metavar="ROWS:CANDIDATES:CONTEXT")
    parser.add_argument("--layers", type=layer_count, default=RELEASED_LAYERS)
    parser.add_argument("--steps", type=step_count, default=8, help="steps of a loop; the last one's stamps are read")
    parser.add_argument("--repeats", type=step_count, default=5, help="loops that are timed")
    parser.add_argument("--json", type=Path, help="where to write the figures")
    return parser.parse_args(arguments)


def main() -> None:
    """Run the cases, print and write."""
    options = parse()
    names, device = mark_names(MARKS_SOURCE.read_text()), gpus()[0]
    cuda, bandwidth, parity = reader(), measure(device), verdict(device)
    config = released_config(options.layers)
    print(f"{device.device_kind}, jax {jax.__version__}, guarantee: {guarantee([device])}\n{LOOPBACK}")
    print(f"reading ceiling  {bandwidth}")
    print(f"parity           {parity} (this build with its stamps, 8 ranks on this GPU, a small model)")
    print(f"weights          {describe(config)}", flush=True)
    weights = one_rank(config, device)
    entries = []
    for case in options.cases:
        steps = Steps(weights, case, steps=options.steps, overlap=0.5)
        entries.append(measure_case(steps, cuda, names, bandwidth.bytes_per_second, options.repeats))
        print_case(case, entries[-1])
    if options.json:
        report = {
            "what": " ".join(LOOPBACK.split()), "device": device.device_kind, "layers": config.num_hidden_layers,
            "bandwidth": vars(bandwidth), "parity": vars(parity), "cases": entries,
        }  # fmt: skip
        write_json(options.json, report)
    if parity.differing:
        raise SystemExit("this build does not have the CPU's bits: the times above mean nothing")


if __name__ == "__main__":
    main()
