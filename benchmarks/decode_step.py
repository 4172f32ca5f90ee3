"""How long a decode step takes at the released layer shapes, beside its parity verdict and its memory floor.

    python benchmarks/decode_step.py [--layers 2] [--steps 20] [--json FILE]

All 8 ranks live on the GPUs at hand (one or more); a slice of the model's layers, random weights (released.py).
The floor is what the step must read (weights of the experts that were really chosen, dense weights, KV) over the read
bandwidth measured in the same run. Expected ballpark on one H200: see docs/performance.md.
"""

import argparse
import dataclasses
import json
import time

import jax
import jax.numpy as jnp
import numpy as np
from released import on_mesh, random_decode_weights, slice_config

from muse_jax import decode, make_mesh


def bandwidth() -> float:
    """Bytes per second of reading 4 GB by one XLA reduction: the ceiling of this run."""
    x = jnp.zeros((1 << 30,), jnp.float32)
    read = jax.jit(lambda x: jnp.max(x))
    read(x).block_until_ready()
    times = []
    for _ in range(10):
        begin = time.perf_counter()
        read(x).block_until_ready()
        times.append(time.perf_counter() - begin)
    return x.nbytes / min(times)


def step_bytes(config, experts: np.ndarray, context: int) -> int:
    """Bytes that layers read, all ranks: distinct experts [layers, rows, K], dense weights, KV."""
    h, m, i = config.hidden_size, config.moe_hidden_size, config.moe_intermediate_size
    dense = 2 * (
        h * (2 * config.attention_size + 2 * config.num_key_value_heads * 64) + h * config.attention_size + 2 * h * m
    )
    dense += 4 * config.num_local_experts * h
    expert = 3 * m * i * 9 // 16
    total = 0
    for layer, kind in enumerate(config.layer_types):
        seen = context if kind == "full_attention" else min(context, config.sliding_window)
        total += dense + len(np.unique(experts[layer])) * expert + seen * config.num_key_value_heads * 64 * 4
    return total


def measure(weights, context: int, rows: int, steps: int):
    """(median seconds per layers-call, spread, experts): `rows` tree rows on one sequence at `context` positions."""
    state = decode.init_state(weights.config, weights.mesh, capacity=context + 64)
    lengths = jax.device_put(np.full(1, context, np.int32), state.lengths.sharding)
    state = dataclasses.replace(state, lengths=lengths)
    tokens = np.random.default_rng(0).integers(0, weights.config.vocab_size, rows)
    tree = decode.tree_rows(tokens.tolist(), [-1, *range(rows - 1)], length=context)
    run = jax.jit(lambda w, s: decode.run_layers(w, s, tree)[:2], donate_argnums=1)
    _, state, taps = jax.jit(lambda w, s: decode.run_layers(w, s, tree, taps=True), donate_argnums=1)(weights, state)

    @jax.jit
    def loop(w, s):
        return jax.lax.fori_loop(0, steps, lambda _, s: run(w, s)[1], s)

    times = []
    for _ in range(6):
        begin = time.perf_counter()
        state = loop(weights, state)
        jax.block_until_ready(state.epoch)
        times.append((time.perf_counter() - begin) / steps)
    weights.communicator.check()
    times = np.sort(times[1:])
    return float(np.median(times)), float(times[-1] - times[0]), np.asarray(taps.experts)


def verdict(weights) -> int:
    """Differing bytes of one 3-row step against the CPU backend."""
    cpu = on_mesh(weights, make_mesh(jax.devices("cpu")[:1]))
    results = []
    for w in (weights, cpu):
        state = decode.init_state(w.config, w.mesh, capacity=64)
        rows = decode.chain_rows([1, 2, 3], [0, 0, 0], [0, 1, 2], 3)
        stream, state, taps = jax.jit(lambda w, s, rows=rows: decode.run_layers(w, s, rows, taps=True))(w, state)
        results.append(
            [np.asarray(x) for x in (stream, taps.residuals, taps.experts, taps.weights, state.k_full, state.k_ring)]
        )
    return sum(int((a.view(np.uint8) != b.view(np.uint8)).sum()) for a, b in zip(*results, strict=True))


def main() -> None:
    """Run and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--json")
    options = parser.parse_args()
    gpus = jax.devices("gpu")
    mesh = make_mesh(gpus[: 1 << (len(gpus).bit_length() - 1)])
    count, name, ceiling = mesh.devices.size, gpus[0].device_kind, bandwidth()
    config = slice_config(options.layers)
    weights = random_decode_weights(config, mesh)
    differing = verdict(weights)
    print(f"{count} x {name}, 8 ranks, {options.layers} layers of the released shapes")
    print(f"reading ceiling {ceiling / 1e12:.2f} TB/s per GPU; differing bytes against the CPU: {differing}")
    table = []
    for rows, context in ((1, 1024), (8, 1024), (16, 1024), (16, 8192), (16, 131072)):
        seconds, spread, experts = measure(weights, context, rows, options.steps)
        floor = step_bytes(config, experts, context) / (ceiling * count)
        entry = {
            "rows": rows,
            "context": context,
            "distinct_experts": [len(np.unique(e)) for e in experts],
            "us_per_layer": seconds / options.layers * 1e6,
            "spread_us": spread / options.layers * 1e6,
            "floor_us_per_layer": floor / options.layers * 1e6,
            "share_of_floor": floor / seconds,
        }
        table.append(entry)
        print(
            f"rows {rows:3} context {context:7} experts {entry['distinct_experts']} "
            f"{entry['us_per_layer']:8.1f} us per layer (spread {entry['spread_us']:.1f}), "
            f"floor {entry['floor_us_per_layer']:6.1f}, share {100 * entry['share_of_floor']:.0f} %"
        )
    if options.json:
        result = {"device": name, "gpus": count, "ceiling": ceiling, "differing_bytes": differing, "table": table}
        with open(options.json, "w") as file:
            json.dump(result, file, indent=1)


if __name__ == "__main__":
    main()
