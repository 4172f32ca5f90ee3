"""Time decoding on your own weights, beside its parity verdict: the fused step against the reference, in one run.

    python examples/benchmark.py checkpoints/pair/target

Absolute times are printed on GPUs only; on a CPU they would say something about the CPU. `benchmarks/` has the rest:
the memory floor, phases, other implementations.
"""

import argparse
import sys
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

import muse_jax

STEPS = 8


def median_seconds(run: Callable[[], object], repeats: int = 5) -> float:
    """Of `repeats` runs after one that compiles; `run` blocks until its result is there."""
    run()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return float(np.median(times))


def main() -> None:
    """Loads a checkpoint, checks parity, times a decode step and the reference's forward of as many tokens."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("checkpoint", help="folder: ours or Hugging Face's")
    model = muse_jax.load(parser.parse_args().checkpoint, mesh=muse_jax.make_mesh())
    if model.tokenizer is None:
        sys.exit("this checkpoint has no tokenizer; give token ids instead")
    ids = model.tokenizer.encode("def decode(state):").ids[:STEPS]
    report = muse_jax.parity(model, ids)
    state = model.init_state(batch=1, capacity=STEPS)

    def decode() -> None:
        nonlocal state
        state = model.init_state(batch=1, capacity=STEPS)
        for token in ids:
            _, state = model.decode_step(state, jnp.asarray([token]))
        jax.block_until_ready(state)

    fused = median_seconds(decode) / len(ids)
    reference = median_seconds(lambda: jax.block_until_ready(model.reference(jnp.asarray([ids]))))
    device = model.mesh.devices.flat[0]
    print(
        f"{model.mesh.devices.size} x {device.device_kind}: {report.differing_bytes} of {report.bytes:,} bytes differ"
    )
    print(f"a decode step takes {fused / reference:.2f} times as long as the reference's forward of {len(ids)} tokens")
    if device.platform != "cpu":
        print(f"{fused * 1e3:.3f} ms per step, one call each")
    sys.exit(report.differing_bytes > 0)


if __name__ == "__main__":
    main()
