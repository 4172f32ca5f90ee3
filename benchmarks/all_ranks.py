"""Eight real ranks on the GPUs at hand, a few layers at the released shapes: decode_step.py --all-ranks.

On N GPUs each carries 8/N ranks, so a layer reads 8/N times what one rank of eight on its own GPU reads; between GPUs
the ranks really exchange.
"""

import dataclasses
from typing import Any

import jax
import numpy as np
from bandwidth import measure as measure_bandwidth
from released import random_decode_weights, slice_config
from stepping import Times, gpus, timed
from verdict import compare

from muse_jax import MuseSparkConfig, decode, guarantee, make_mesh
from muse_jax.decode import DecodeWeights

LAYERS = 2
CASES = ((1, 1024), (8, 1024), (16, 1024), (16, 8192), (16, 131072))  # rows, context


def step_bytes(config: MuseSparkConfig, experts: np.ndarray, context: int) -> int:
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


def measure(weights: DecodeWeights, rows: int, context: int, steps: int, repeats: int) -> tuple[Times, np.ndarray]:
    """Times of the layers, and the experts chosen [layers, rows, K]; every step makes the same choice."""
    state = decode.init_state(weights.config, weights.mesh, capacity=context + 64)
    lengths = jax.device_put(np.full(1, context, np.int32), state.lengths.sharding)
    state = dataclasses.replace(state, lengths=lengths)
    tokens = np.random.default_rng(0).integers(0, weights.config.vocab_size, rows)
    tree = decode.tree_rows(tokens.tolist(), [-1, *range(rows - 1)], length=context)
    _, state, taps = jax.jit(lambda w, s: decode.run_layers(w, s, tree, taps=True), donate_argnums=1)(weights, state)
    assert taps is not None

    def loop(w, s):
        return jax.lax.fori_loop(0, steps, lambda _, s: decode.run_layers(w, s, tree)[1], s)

    compiled = jax.jit(loop, donate_argnums=1)

    def run():
        nonlocal state
        state = compiled(weights, state)
        return state.epoch

    times = timed(run, repeats, steps)
    weights.communicator.check()
    return times, np.asarray(taps.experts)


def run(layers: int, steps: int, repeats: int) -> dict[str, Any]:
    """Measure and print; the report."""
    devices = gpus()
    mesh = make_mesh(devices[: 1 << (min(len(devices), 8).bit_length() - 1)])
    count, name = mesh.devices.size, devices[0].device_kind
    bandwidth = measure_bandwidth(devices[0])
    weights = random_decode_weights(slice_config(layers), mesh)
    parity = compare(weights)
    print(f"{count} x {name}, jax {jax.__version__}, guarantee: {guarantee(mesh)}")
    print(f"8 ranks that really exchange, {8 // count} per GPU; {layers} layers of the released shapes, no head")
    print(f"reading ceiling  {bandwidth} per GPU, GPU 0")
    print(f"parity           {parity} (these weights)", flush=True)
    table = []
    for rows, context in CASES:
        times, experts = measure(weights, rows, context, steps, repeats)
        floor = step_bytes(weights.config, experts, context) / (bandwidth.bytes_per_second * count)
        entry = {
            "rows": rows, "context": context, "distinct_experts": [len(np.unique(e)) for e in experts],
            "us_per_layer": times.median / layers * 1e6, "spread_us": times.spread / layers * 1e6,
            "floor_us_per_layer": floor / layers * 1e6, "share_of_floor": floor / times.median,
        }  # fmt: skip
        table.append(entry)
        print(
            f"rows {rows:3} context {context:7,} experts {entry['distinct_experts']} "
            f"{entry['us_per_layer']:8.1f} us per layer (spread {entry['spread_us']:.1f}), "
            f"floor {entry['floor_us_per_layer']:6.1f}, {entry['share_of_floor']:.0%} of the floor's speed",
            flush=True,
        )
    return {
        "what": "eight real ranks", "device": name, "gpus": count, "jax": jax.__version__, "layers": layers,
        "bandwidth": vars(bandwidth), "parity": vars(parity), "cases": table,
    }  # fmt: skip
