"""What a speculative step costs at the released shapes, kernel by kernel, beside its floors and parity verdicts.

    python benchmarks/drafted_step.py [--context 1k] [--blocks 8 16] [--json FILE]

ONE rank of eight on one GPU as in decode_step.py (peers played by itself, meaningless text), and a whole DFlash2 draft:
five layers, hidden 8192, a vocabulary of 202,048, blocks of 8 and of 16 rows, random weights. A step proposes a tree,
verifies it, and commits what the target would have chosen. Kernels' times are the profiler's; the whole step's are the
host's clock over a loop of steps. The draft's floor is the time to read its weights once at the bandwidth measured in
the same run. Acceptance is timed where it has most to do: a chain of which every node is right.
"""

import argparse
import collections
import dataclasses
import tempfile
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from bandwidth import measure
from one_rank import one_rank, one_rank_state, routing
from stepping import (
    LOOPBACK,
    RELEASED_LAYERS,
    Case,
    Steps,
    Times,
    describe,
    gpus,
    released_config,
    step_count,
    timed,
    write_json,
)
from verdict import Verdict, verdict

from muse_jax import make_mesh
from muse_jax.decode import DecodeWeights
from muse_jax.decode.step import Taps
from muse_jax.mesh import replicated
from muse_jax.speculative import DFlashConfig, DFlashDraft, Seen, TokenTree, accept, chain, speculative_step
from muse_jax.speculative.dflash import make_draft
from muse_jax.speculative.dflash_model import draft_specs

CANDIDATES = 52
"""Experts of a layer among which the rows choose, as in decode_step.py's cases of 16 rows."""
PROFILED = 5
"""Steps under the profiler."""
OURS = {"draft_kernel": "draft", "decode_layers": "verify",
        "accept_kernel": "accept", "emset": "memory set"}  # fmt: skip


def draft_config(block_width: int, shrink: int = 1) -> DFlashConfig:
    """The released shapes, or all but the heads so many times smaller."""
    return DFlashConfig(
        vocab_size=202048 // shrink, hidden_size=8192 // shrink, num_attention_heads=64, num_key_value_heads=8,
        head_dim=128, intermediate_size=16384 // shrink, windows=(2048,) * 5, rope_theta=5e5, rms_norm_eps=1e-5,
        tap_layers=(1, 16, 30, 44, 59), mask_token_id=202048 // shrink - 1, output_multiplier=0.17,
        final_logit_softcapping=20.0, block_width=block_width, selector_rank=256, conv_group_size=16,
    )  # fmt: skip


@dataclasses.dataclass(frozen=True)
class OwnShare:
    """A draft whose tokens are of the vocabulary's first eighth: only that lies on the one rank."""

    inner: DFlashDraft

    @property
    def width(self) -> int:
        """The draft's."""
        return self.inner.width

    @property
    def tap_layers(self) -> tuple[int, ...]:
        """The draft's."""
        return self.inner.tap_layers

    def start(self, *, batch: int, capacity: int) -> Any:
        """The draft's."""
        return self.inner.start(batch=batch, capacity=capacity)

    def observe(self, carry: Any, seen: Seen) -> Any:
        """The draft's."""
        return self.inner.observe(carry, seen)

    def propose(self, carry: Any, seen: Seen, token: jax.Array, lengths: jax.Array) -> tuple[TokenTree, Any]:
        """The draft's trees, their tokens modulo the share."""
        tree, carry = self.inner.propose(carry, seen, token, lengths)
        return dataclasses.replace(tree, token=tree.token % (self.inner.config.vocab_size // 8)), carry


jax.tree_util.register_dataclass(OwnShare, ["inner"], [])


def random_draft(config: DFlashConfig, device: Any) -> DFlashDraft:
    """Its weights drawn on the device."""
    whole = replicated(make_mesh([device]))

    def draw(key: jax.Array, shape: tuple[int, ...], std: float) -> jax.Array:
        bits = jax.random.bits(key, shape, jnp.uint8).astype(jnp.float32)
        return ((bits - 127.5) * (std / 74)).astype(jnp.bfloat16)

    make = jax.jit(draw, static_argnames=("shape", "std"), out_shardings=whole)
    specs = draft_specs(config).items()
    keys = iter(jax.random.split(jax.random.key(0), len(specs) + 2))
    params = {
        name: make(next(keys), spec.shape, spec.shape[-1] ** -0.5 if len(spec.shape) == 2 else 1.0)
        for name, spec in specs
    }
    shape = (config.vocab_size, config.hidden_size)
    return make_draft(config, params, make(next(keys), shape, 1.0), make(next(keys), shape, shape[1] ** -0.5))


def observed(draft: DFlashDraft, count: int, length: int, mesh: Any) -> tuple[Any, Seen]:
    """A carry that has seen nothing, and `count` tokens from position `length` on that it has yet to see."""
    config = draft.config
    features = np.random.default_rng(0).standard_normal((1, draft.width, len(draft.tap_layers), config.hidden_size))
    seen = Seen(
        jnp.zeros((1, draft.width), jnp.int32), jnp.asarray(features, jnp.bfloat16), jnp.full(1, count, jnp.int32),
        jnp.full(1, length, jnp.int32),
    )  # fmt: skip
    return jax.device_put((draft.start(batch=1, capacity=length + 4096), seen), replicated(mesh))


def draft_verdict(device: Any) -> Verdict:
    """A draft an eighth as large proposes twice, here and on the CPU: trees and contexts, byte for byte."""
    cpu = jax.devices("cpu")[0]
    made, found = random_draft(draft_config(16, shrink=8), cpu), []
    for where in (device, cpu):
        mesh = make_mesh([where])
        params, *shared = jax.device_put((dict(made.params), made.embedding, made.head), replicated(mesh))
        draft = make_draft(made.config, params, *shared)
        carry, seen = observed(draft, 6, 300, mesh)
        outputs = []
        for token in (5, 7):
            given = jax.device_put((jnp.full(1, token, jnp.int32), seen.lengths + 6), replicated(mesh))
            tree, carry = jax.jit(DFlashDraft.propose)(draft, carry, seen, *given)
            outputs += [np.asarray(x) for x in jax.tree.leaves((tree, carry))]
        found.append(outputs)
    pairs = list(zip(*found, strict=True))
    differing = sum(int((a.view(np.uint8) != b.view(np.uint8)).sum()) for a, b in pairs)
    return Verdict(differing, sum(a.nbytes for a, _ in pairs))


def kernel_seconds(run: Any, calls: int) -> dict[str, tuple[float, float]]:
    """Per call of `run`: name of a kernel -> (launches, seconds), by the profiler; what is not ours is "XLA"."""
    launches, seconds = collections.Counter(), collections.Counter()
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            jax.block_until_ready([run() for _ in range(calls)])
        [path] = Path(folder).rglob("*.xplane.pb")
        for plane in jax.profiler.ProfileData.from_file(str(path)).planes:
            if not plane.name.startswith("/device:GPU:"):
                continue
            for line in plane.lines:
                if line.name.startswith("Stream"):  # other lines repeat the events by module and by operation
                    for event in line.events:
                        name = next((words for part, words in OURS.items() if part in event.name), "XLA")
                        launches[name] += 1
                        seconds[name] += event.duration_ns * 1e-9
    return {name: (launches[name] / calls, seconds[name] / calls) for name in launches}


def time_step(weights: DecodeWeights, block_width: int, context: int, repeats: int) -> dict[str, Any]:
    """One entry of the report: a drafted step, its kernels, and acceptance of a whole chain."""
    mesh = weights.mesh
    draft = random_draft(draft_config(block_width), next(iter(mesh.devices.flat)))
    state = one_rank_state(weights, context, context + 4096)
    carry = observed(draft, 6, context - 6, mesh)
    token, active = jax.device_put((jnp.full(1, 5, jnp.int32), jnp.ones(1, bool)), replicated(mesh))
    step = jax.jit(speculative_step, donate_argnames=("state", "carry"))

    def run() -> Any:
        nonlocal state, carry
        out, state, carry = step(weights, state, OwnShare(draft), carry, token, active)
        return out.token

    steps = 10
    times = timed(lambda: [run() for _ in range(steps)], repeats, steps)
    kernels = kernel_seconds(run, PROFILED)
    config, nodes = weights.config, jnp.arange(1, block_width + 1, dtype=jnp.int32)
    right = jax.device_put((chain(nodes[None] - 1), nodes, jnp.zeros(block_width, bool), active), replicated(mesh))
    residuals = jnp.ones((config.num_hidden_layers, 2, block_width, config.hidden_size), jnp.float32)
    taps = jax.device_put(Taps(residuals, residuals[..., :1], residuals[..., :1]), replicated(mesh))
    accepting = jax.jit(accept, static_argnames="tap_layers", donate_argnums=0)

    def run_accept() -> Any:
        nonlocal state
        out, state = accepting(state, *right, taps, tap_layers=draft.tap_layers)
        return out.count

    counts = {int(jax.block_until_ready(run_accept())[0]) for _ in range(3)}
    if counts != {block_width}:
        raise SystemExit(f"a chain of {block_width} right nodes brought {counts} tokens")
    weights.communicator.check()
    read = sum(x.nbytes for name, x in draft.params.items() if "codebook" not in name) + draft.head.nbytes
    return {
        "block": block_width, "seconds": times.median, "spread_seconds": times.spread, "kernels": kernels,
        "accept_of_all": kernel_seconds(run_accept, 20)["accept"][1], "draft_bytes": read,
    }  # fmt: skip


def print_entry(entry: dict[str, Any], plain: Times, ceiling: float) -> None:
    """One width's lines."""
    floor, drafting = entry["draft_bytes"] / ceiling, entry["kernels"]["draft"][1]
    print(
        f"\n{entry['block']} nodes: a step takes {entry['seconds'] * 1e3:.3f} ms (spread "
        f"{entry['spread_seconds'] * 1e3:.3f}), as long as {entry['seconds'] / plain.median:.2f} plain ones"
    )
    for name, (launches, seconds) in sorted(entry["kernels"].items(), key=lambda item: -item[1][1]):
        print(f"  {name:15} {launches:4.0f} launched, {seconds * 1e3:8.3f} ms")
    print(
        f"  the draft's floor is {floor * 1e3:.3f} ms for {entry['draft_bytes'] / 1e9:.2f} GB: "
        f"{floor / drafting:.0%} of its speed\n"
        f"  accept, {entry['block']} of {entry['block']} nodes right: {entry['accept_of_all'] * 1e6:.1f} us",
        flush=True,
    )


def main() -> None:
    """Run, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--context", default="1k", help="committed positions, such as 8k")
    parser.add_argument("--blocks", type=int, nargs="+", default=[8, 16], choices=range(2, 17), metavar="NODES")
    parser.add_argument("--repeats", type=step_count, default=5, help="loops of ten steps that are timed")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    options = parser.parse_args()
    try:
        case = Case.parse(f"1:8:{options.context}")
    except argparse.ArgumentTypeError as error:
        parser.error(str(error))
    device = gpus()[0]
    bandwidth, parities = measure(device), (verdict(device), draft_verdict(device))
    config = released_config(RELEASED_LAYERS)
    print(f"{device.device_kind}, jax {jax.__version__}\n{LOOPBACK}\nreading ceiling  {bandwidth}")
    print(f"parity           {parities[0]}; of a draft, {parities[1]} (this build, small models)", flush=True)
    weights = jax.block_until_ready(one_rank(config, device))
    plain = Steps(weights, case, steps=10, overlap=0.5).time(options.repeats, head=True)
    print(f"weights          {describe(config)}\na plain step, {case}: {plain.median * 1e3:.3f} ms", flush=True)
    bias = jax.device_put(routing(config, CANDIDATES, 1, 0.5)[0], weights.router_bias.sharding)
    routed = dataclasses.replace(weights, router_bias=bias)
    entries = []
    for width in options.blocks:
        entries.append(time_step(routed, width, case.context, options.repeats))
        print_entry(entries[-1], plain, bandwidth.bytes_per_second)
    if options.json:
        report = {
            "what": " ".join(LOOPBACK.split()), "device": device.device_kind, "jax": jax.__version__,
            "bandwidth": vars(bandwidth), "parity": [vars(p) for p in parities], "plain": vars(plain),
            "drafted": entries,
        }  # fmt: skip
        write_json(options.json, report)
    if any(parity.differing for parity in parities):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
