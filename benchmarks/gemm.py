"""Speed of the canonical GEMM on a GPU against XLA's own bf16 dot, and its bits against the CPU.

JAX_PLATFORMS=cuda,cpu python benchmarks/gemm.py [--json results.json]
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from muse_jax import ops

SHAPES = [(16, 8192, 8192), (64, 8192, 8192), (1024, 8192, 8192), (4096, 8192, 8192), (4096, 4096, 8192)]
CALLS, REPEATS, SAMPLED_ROWS = 8, 5, 8


def seconds(product: Callable[..., jax.Array], xs: list[jax.Array], w: jax.Array) -> float:
    """Median time of one product; several different ones run in one program, so that launches cost nothing."""
    run = jax.jit(lambda xs, w: [product(x, w) for x in xs])
    jax.block_until_ready(run(xs, w))
    times = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        jax.block_until_ready(run(xs, w))
        times.append((time.perf_counter() - start) / len(xs))
    return statistics.median(times)


def xla_dot(x: jax.Array, w: jax.Array) -> jax.Array:
    """What XLA makes of the same product."""
    return jnp.einsum("tk,nk->tn", x, w, preferred_element_type=jnp.bfloat16)


def measure(gpu: jax.Device, rows: int, columns: int, inner: int) -> dict:
    """One shape's line of the report."""
    rng = np.random.default_rng(0)
    host_xs = [rng.standard_normal((rows, inner), np.float32).astype(jnp.bfloat16) for _ in range(CALLS)]
    host_w = rng.standard_normal((columns, inner), np.float32).astype(jnp.bfloat16)
    xs, w = [jax.device_put(x, gpu) for x in host_xs], jax.device_put(host_w, gpu)
    ours, theirs = seconds(ops.gemm, xs, w), seconds(xla_dot, xs, w)

    cpu = jax.devices("cpu")[0]
    sample = np.sort(rng.choice(rows, min(rows, SAMPLED_ROWS), replace=False))
    with jax.default_device(gpu):
        device = np.asarray(ops.gemm(xs[0], w))[sample]
    with jax.default_device(cpu):
        host = np.asarray(ops.gemm(jax.device_put(host_xs[0][sample], cpu), jax.device_put(host_w, cpu)))
    work = 2e-12 * rows * columns * inner
    return {
        "rows": rows, "columns": columns, "inner": inner, "seconds": ours, "teraflops": work / ours,
        "xla_seconds": theirs, "xla_teraflops": work / theirs, "speed_ratio": theirs / ours,
        "sampled_rows": len(sample), "differing_bytes": int((device.view(np.uint8) != host.view(np.uint8)).sum()),
    }  # fmt: skip


def main() -> None:
    """Measure, print a table, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="also write the figures here")
    arguments = parser.parse_args()
    gpu = jax.devices("gpu")[0]
    report = {"device": gpu.device_kind, "jax": jax.__version__, "gemm": [measure(gpu, *shape) for shape in SHAPES]}
    print(f"{report['device']}, jax {report['jax']}")
    print("  rows columns  inner    TFLOP/s   XLA's   ratio   parity with the CPU (sampled rows)")
    for line in report["gemm"]:
        verdict = "identical" if not line["differing_bytes"] else f"{line['differing_bytes']} BYTES DIFFER"
        print(
            f"{line['rows']:6} {line['columns']:7} {line['inner']:6} {line['teraflops']:10.1f} "
            f"{line['xla_teraflops']:7.1f} {line['speed_ratio']:7.2f}   {verdict} ({line['sampled_rows']})"
        )
    if arguments.json:
        arguments.json.write_text(json.dumps(report, indent=1) + "\n")
    if any(line["differing_bytes"] for line in report["gemm"]):
        raise SystemExit("the CUDA GEMM does not have the CPU's bits")


if __name__ == "__main__":
    main()
