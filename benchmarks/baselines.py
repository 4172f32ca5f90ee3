"""The fused layer beside what one would use instead, at the released shapes of one rank of eight, in one run.

    python benchmarks/baselines.py [--cases 16:52 1:8] [--only TEXT ...] [--json FILE]

Against the fused kernel (a slice of the model, time per layer):
- XLA: the layer as plain jnp, bf16 weights, NVFP4 experts expanded to bf16; several ways to get at the chosen experts;
- muse_jax.ops: our op-by-op path, NVFP4 experts, with the contract's bits;
- PyTorch under a CUDA graph: only the dense products, and one MoE layer with bf16 experts (baseline_torch.py).

Everything is ONE rank's share of one layer: exchanges with the other seven cost nothing anywhere. Four layers with
their own weights and routing follow each other, so that caches do not help. "x 62" is a layer's time multiplied by the
release's number of layers; nobody ran 62 of them here. The context is 1,024, within the sliding window, so that all
layers are alike.
"""

import argparse
import functools
import time
from pathlib import Path
from typing import Any

import baseline_torch
import jax
import jax.numpy as jnp
import numpy as np
from bandwidth import measure as measure_bandwidth
from baseline_layer import (
    Experts,
    Layer,
    Ours,
    Weights,
    Xla,
    experts_distinct,
    experts_loop,
    experts_ours,
    experts_per_token,
    experts_ragged,
    make_weights,
)
from one_rank import one_rank, rank_bytes, routing
from stepping import (
    LOOPBACK,
    RELEASED_LAYERS,
    Case,
    Steps,
    gpus,
    layer_count,
    released_config,
    step_count,
    timed,
    write_json,
)
from verdict import verdict

from muse_jax import MuseSparkConfig, guarantee, ops

BASELINE_LAYERS, ROUNDS, OVERLAP = 4, 4, 0.5
CONTEXT = 1024


def ways(config: MuseSparkConfig, candidates: int) -> dict[str, Layer]:
    """Every way to run a layer in JAX without the fused kernel."""
    xla = Xla(config)
    experts: dict[str, Experts] = {
        "experts gathered per token": experts_per_token,
        "distinct experts gathered": experts_distinct(candidates, quantised=False),
        "distinct experts, from NVFP4": experts_distinct(candidates, quantised=True),
        "expert by expert": experts_loop(candidates),
        "ragged_dot": experts_ragged,
    }
    layers = {f"XLA: {name}": Layer(xla, run) for name, run in experts.items()}
    return layers | {"muse_jax.ops, op by op": Layer(Ours(config), experts_ours(config))}


class Workload:
    """The layers' weights, and one case's routing and rows."""

    def __init__(self, config: MuseSparkConfig, weights: list[Weights], case: Case):
        """`weights` of as many layers as follow each other."""
        some = config.replace(
            num_hidden_layers=len(weights), layer_types=("sliding_attention",) * len(weights),
            layer_rope_theta=(config.rope_theta,) * len(weights), expert_formats=("nvfp4",) * len(weights),
        )  # fmt: skip
        self.config, self.weights, self.case = some, weights, case
        self.bias = jnp.asarray(routing(some, case.candidates, ROUNDS, OVERLAP, seed=1))
        position = np.arange(case.context, case.context + case.rows, dtype=np.int32)
        self.position = jnp.asarray(position)
        self.table = jnp.asarray(ops.rope_table(case.context + case.rows, config.rope_theta)[position])
        self.stream = jax.random.normal(jax.random.key(2), (case.rows, config.hidden_size), jnp.float32)

    def pass_through(self, layer: Layer, stream: jax.Array, bias: jax.Array, weights: list[Weights]):
        """All layers once -> (stream, chosen [layers, T, K])."""
        chosen = []
        for w, b in zip(weights, bias, strict=True):
            stream, choice = layer(stream, b, self.position, self.table, w)
            chosen.append(choice)
        return stream, jnp.stack(chosen)

    def first(self, layer: Layer) -> tuple[np.ndarray, np.ndarray]:
        """What the first layer alone makes of the rows, and what all choose in the first round."""
        run = jax.jit(functools.partial(self.pass_through, layer))
        stream, _ = run(self.stream, self.bias[0, :1], self.weights[:1])
        return np.asarray(stream), np.asarray(run(self.stream, self.bias[0], self.weights)[1])

    def seconds(self, layer: Layer, repeats: int) -> float:
        """Median time of one layer, over loops of ROUNDS passes."""

        def loop(stream: jax.Array, bias: jax.Array, weights: list[Weights]) -> jax.Array:
            def body(i, s):
                return self.pass_through(layer, s, bias[i], weights)[0]

            return jax.lax.fori_loop(0, ROUNDS, body, stream)

        run = jax.jit(loop)
        return timed(lambda: run(self.stream, self.bias, self.weights), repeats, ROUNDS * len(self.weights)).median


def jax_baselines(work: Workload, only: list[str], repeats: int) -> tuple[dict[str, float | str], np.ndarray]:
    """Seconds of a layer by way, or why there are none; and the experts chosen [layers, T, K]."""
    layers = ways(work.config, work.case.candidates)
    expected, chosen = work.first(layers["XLA: experts gathered per token"])
    results: dict[str, float | str] = {}
    for name, layer in layers.items():
        if not wanted(name, only):
            continue
        begin = time.perf_counter()
        try:
            difference = np.linalg.norm(work.first(layer)[0] - expected) / np.linalg.norm(expected)
            if not difference < (0.005 if name.startswith("XLA") else 0.1):  # ours quantises activations too
                raise ArithmeticError(f"differs from the first way by {difference:.3g}")
            results[name] = work.seconds(layer, repeats)
        except Exception as error:  # a way that this JAX or this memory cannot go must not hide the others
            results[name] = f"failed: {type(error).__name__}: {str(error).splitlines()[0][:160]}"
        print(f"  ({name}: {time.perf_counter() - begin:.0f} s to compile and run)", flush=True)
    return results, chosen


def wanted(name: str, only: list[str]) -> bool:
    """Is the way asked for?"""
    return not only or any(text.lower() in name.lower() for text in only)


def torch_baselines(
    config: MuseSparkConfig, chosen: np.ndarray, ordinal: int, only: list[str], repeats: int
) -> dict[str, float | str]:
    """PyTorch's parts, and dense and the faster MoE together."""
    if not wanted("PyTorch", only):
        return {}
    q, kv = config.attention_size // 8, config.num_key_value_heads // 8 * 64
    sizes = baseline_torch.Sizes(
        hidden=config.hidden_size, qkvu=2 * q + 2 * kv, q=q, moe_hidden=config.moe_hidden_size,
        inner=config.moe_intermediate_size // 8, experts=config.num_local_experts,
        router=config.num_local_experts // 8,
    )  # fmt: skip
    results = baseline_torch.measure(sizes, chosen, ordinal, repeats)
    moe = [x for name, x in results.items() if "MoE" in name and isinstance(x, float)]
    dense = [x for name, x in results.items() if "dense" in name and isinstance(x, float)]
    if moe and dense:
        results["PyTorch graph: dense + faster MoE"] = dense[0] + min(moe)
    return results


def print_table(case: Case, fused: float, results: dict[str, float | str], floors: dict[str, float]) -> None:
    """One case's lines."""
    print(f"\n{case}; one layer of one rank\n{'':46}{'us per layer':>14}{'x 62, ms':>11}{'against fused':>15}")
    print(f"  {'fused, NVFP4':44}{fused * 1e6:14.1f}{fused * RELEASED_LAYERS * 1e3:11.2f}{'1':>15}")
    for name, x in results.items():
        if isinstance(x, str):
            print(f"  {name:44}  {x}")
        else:
            print(f"  {name:44}{x * 1e6:14.1f}{x * RELEASED_LAYERS * 1e3:11.2f}{x / fused:14.1f}x")
    best = min((x for name, x in results.items() if name.startswith("XLA") and isinstance(x, float)), default=None)
    if best is not None:
        print(f"  the fused layer is {best / fused:.1f} times as fast as XLA's fastest way")
    read = ", ".join(f"{name} {seconds * 1e6:.1f} us" for name, seconds in floors.items())
    print(f"  reading alone, at the ceiling: {read}", flush=True)


def parse_case(text: str) -> Case:
    """ROWS:CANDIDATES."""
    if text.count(":") != 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not ROWS:CANDIDATES, such as 16:52")
    return Case.parse(f"{text}:{CONTEXT}")


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    default = [parse_case("16:52"), parse_case("1:8")]
    parser.add_argument("--cases", type=parse_case, nargs="+", default=default, metavar="ROWS:CANDIDATES")
    parser.add_argument("--layers", type=layer_count, default=16, help="layers of the fused kernel's run")
    parser.add_argument("--repeats", type=step_count, default=5)
    parser.add_argument("--only", nargs="+", default=[], metavar="TEXT", help="only baselines whose name has the text")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    return parser.parse_args(arguments)


def main() -> None:
    """Run, print, write."""
    options = parse()
    device = gpus()[0]
    bandwidth, parity = measure_bandwidth(device), verdict(device)
    print(f"{device.device_kind}, jax {jax.__version__}, guarantee: {guarantee([device])}\n{LOOPBACK}")
    print(f"reading ceiling  {bandwidth}\nparity           {parity} (the fused kernel, a small model)", flush=True)
    config = released_config(options.layers)
    fused_weights = one_rank(config, device)
    with jax.default_device(device):
        weights = [make_weights(config, CONTEXT, seed) for seed in range(BASELINE_LAYERS)]
    report: dict[str, Any] = {"device": device.device_kind, "bandwidth": vars(bandwidth), "parity": vars(parity)}
    report["cases"] = []
    for case in options.cases:
        steps = Steps(fused_weights, case, steps=8, overlap=OVERLAP)
        fused = steps.time(options.repeats, head=False).median / options.layers
        with jax.default_device(device):
            results, chosen = jax_baselines(Workload(config, weights, case), options.only, options.repeats)
        distinct = [len(np.unique(c)) for c in chosen]
        results |= torch_baselines(config, chosen, device.local_hardware_id, options.only, options.repeats)
        per_layer = {k: x / options.layers for k, x in steps.bytes_by_kind().items() if k != "head"}
        one = released_config(1)
        plain = rank_bytes(
            one.replace(expert_formats=("bf16",)), np.array([np.mean(distinct)]), case.context, case.rows
        )
        floors = {"fused": sum(per_layer.values()), "bf16 experts": sum(plain.values()) - plain["head"]}
        floors = {name: size / bandwidth.bytes_per_second for name, size in floors.items()}
        print_table(case, fused, results, floors)
        hit = float(steps.hits().sum(axis=2).mean())
        print(f"  experts hit per layer: fused {hit:.1f}, baselines {np.mean(distinct):.1f}")
        report["cases"].append(
            {"case": vars(case), "fused_seconds": fused, "baselines": results, "floors": floors,
             "distinct_fused": hit, "distinct_baselines": distinct, "layers_of_the_fused_run": options.layers}
        )  # fmt: skip
    if options.json:
        write_json(options.json, report)
    if parity.differing:
        raise SystemExit("this build does not have the CPU's bits: the fused times above mean nothing")


if __name__ == "__main__":
    main()
