"""Texts with a draft against texts without: differing tokens and bytes, tokens per step and tokens per second.

    python benchmarks/speculative.py [--cases 260] [--tokens 100] [--json FILE]

A small model with random weights; the draft knows the text and errs as often as it is told, in random trees and chains
of 2 to 16 nodes. A case is four prompts, every third sampled. Exit code 1 if anything differs.

Speeds are of this small model with a draft that costs nothing: what verification and acceptance bring and cost. What a
step costs at released shapes is drafted_step.py's. On CPUs only the ratio is printed.
"""

import argparse
import dataclasses
import itertools
import os
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("PJRT_NPROC", "64")  # jaxlib before 0.12 hangs when many CPU programs are in flight

import jax
import jax.numpy as jnp
import numpy as np
from stepping import write_json

from muse_jax import Generation, LanguageModel, MuseSparkConfig, Sampling, generate, make_mesh
from muse_jax.decode import MAX_ROWS
from muse_jax.speculative import Seen, TokenTree, make_tree
from muse_jax.weights import random_params

BATCH, PROMPT = 4, 6
KINDS = [(right, 16, branches) for right in (0.0, 1.0) for branches in (True, False)] + [
    (0.85, width, branches) for width in (2, 4, 8, 16) for branches in (True, False)
]
"""How often a node is right, nodes of a tree, and whether it has branches."""


@dataclasses.dataclass(frozen=True)
class KnowingDraft:
    """A `Draft` that has read the text: a node is right with probability `right`, otherwise a random token."""

    text: jax.Array
    """int32 [B, positions], 0 behind the end."""
    right: float
    width: int
    branches: bool
    tap_layers: tuple[int, ...] = ()

    def start(self, *, batch: int, capacity: int) -> tuple[()]:
        """Nothing to remember."""
        del batch, capacity
        return ()

    def observe(self, carry: Any, seen: Seen) -> Any:
        """It has read it before."""
        del seen
        return carry

    def propose(self, carry: Any, seen: Seen, token: jax.Array, lengths: jax.Array) -> tuple[TokenTree, Any]:
        """Random trees, or chains."""
        del seen
        shape, node = (token.shape[0], self.width), jnp.arange(self.width, dtype=jnp.int32)
        keys = jax.random.split(jax.random.fold_in(jax.random.key(0), lengths.sum()), 3)
        parent = jnp.broadcast_to(node - 1, shape)
        if self.branches:
            parent = jax.random.randint(keys[0], shape, 0, jnp.maximum(node, 1), jnp.int32).at[:, 0].set(-1)
        tree = make_tree(jnp.zeros(shape, jnp.int32), parent)
        known = jnp.take_along_axis(self.text, lengths[:, None] + tree.depth, axis=1)
        other = jax.random.randint(keys[1], shape, 0, 64, jnp.int32)
        chosen = jnp.where(jax.random.uniform(keys[2], shape) < self.right, known, other).at[:, 0].set(token)
        return dataclasses.replace(tree, token=chosen), carry


jax.tree_util.register_dataclass(KnowingDraft, ["text"], ["right", "width", "branches", "tap_layers"])


def small_model() -> LanguageModel:
    """Two layers, one of each kind."""
    config = MuseSparkConfig.tiny().replace(
        num_hidden_layers=2, layer_types=("sliding_attention", "full_attention"), layer_rope_theta=(500000.0, 0.0),
        expert_formats=("nvfp4", "bf16"), hidden_size=128, num_attention_heads=8,
    )  # fmt: skip
    mesh = make_mesh()
    return LanguageModel(config, random_params(config, 0, mesh, quantized=True), mesh)


def differing(a: Generation, b: Generation) -> tuple[int, int]:
    """(tokens, bytes of log-probabilities) that differ."""
    assert a.log_probs is not None and b.log_probs is not None
    tokens = sum(x != y for x, y in itertools.zip_longest(*(itertools.chain(*g.tokens) for g in (a, b))))
    flat = [np.concatenate(g.log_probs).view(np.uint8) for g in (a, b)]
    return tokens, int((flat[0] != flat[1]).sum()) if len(flat[0]) == len(flat[1]) else max(map(len, flat))


@dataclasses.dataclass
class Tally:
    """What the cases of one kind came to."""

    accepted: np.ndarray
    """int64 [W + 1]: steps that brought so many tokens."""
    tokens: int = 0
    """Of the cases that were timed: all but a kind's first two, which compile (greedy and sampled)."""
    plain: float = 0.0
    drafted: float = 0.0
    """Seconds that these took."""
    seen: set[bool] = dataclasses.field(default_factory=set)


def run(cases: int, tokens: int) -> dict[str, Any]:
    """All cases; the report."""
    model, rng = small_model(), np.random.default_rng(0)
    tallies = [Tally(np.zeros(width + 1, int)) for _, width, _ in KINDS]
    total, wrong_tokens, wrong_bytes = 0, 0, 0
    for case in range(cases):
        prompts, sampled = rng.integers(0, 64, (BATCH, PROMPT)).tolist(), case % 3 == 2
        given: dict[str, Any] = dict(max_new_tokens=tokens, stop_ids=(), logprobs=0)
        if sampled:
            given |= dict(sampling=Sampling(temperature=1.0), keys=jax.random.split(jax.random.key(case), BATCH))
        begin = time.perf_counter()
        plain = generate(model, prompts, **given)
        middle = time.perf_counter()
        text = np.zeros((BATCH, PROMPT + tokens + 2 * MAX_ROWS), np.int32)
        for row, prompt, made in zip(text, prompts, plain.tokens, strict=True):
            row[: len(prompt) + len(made)] = prompt + made
        kind, tally = KINDS[case % len(KINDS)], tallies[case % len(KINDS)]
        draft = KnowingDraft(jnp.asarray(text), *kind)
        ready = time.perf_counter()
        drafted = generate(model, prompts, draft=draft, **given)
        if sampled in tally.seen:
            tally.plain += middle - begin
            tally.drafted += time.perf_counter() - ready
            tally.tokens += sum(map(len, plain.tokens))
        tally.seen.add(sampled)
        tokens_off, bytes_off = differing(drafted, plain)
        wrong_tokens, wrong_bytes = wrong_tokens + tokens_off, wrong_bytes + bytes_off
        total += sum(map(len, plain.tokens))
        assert drafted.acceptance is not None
        tally.accepted += drafted.acceptance.histogram
    drafts = [
        {"right": right, "nodes": width, "trees": "random" if branches else "chains",
         "tokens_per_step": float(np.arange(width + 1) @ t.accepted / max(t.accepted.sum(), 1)),
         "timed_tokens": t.tokens, "plain_seconds": t.plain, "drafted_seconds": t.drafted}
        for (right, width, branches), t in zip(KINDS, tallies, strict=True)
    ]  # fmt: skip
    return {"device": jax.devices()[0].device_kind, "platform": jax.default_backend(), "jax": jax.__version__,
            "cases": cases, "tokens": total, "differing_tokens": wrong_tokens, "differing_bytes": wrong_bytes,
            "drafts": drafts}  # fmt: skip


def speed(line: dict[str, Any], on_gpu: bool) -> str:
    """Of one kind, where it was timed."""
    if not line["timed_tokens"]:
        return ""
    plain, drafted = line["plain_seconds"], line["drafted_seconds"]
    ratio = f", {plain / drafted:.2f} times as fast as without"
    return f", {line['timed_tokens'] / drafted:,.0f} tokens/s{ratio}" if on_gpu else ratio


def main() -> None:
    """Run, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=260)
    parser.add_argument("--tokens", type=int, default=100, help="of each of a case's four texts")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    options = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", 8)
    report = run(options.cases, options.tokens)
    print(
        f"{report['device']}, jax {report['jax']}: {report['cases']} cases, {report['tokens']:,} tokens; "
        f"{report['differing_tokens']} tokens and {report['differing_bytes']} bytes of log-probabilities differ"
    )
    for line in report["drafts"]:
        share, nodes, kind = f"{line['right']:.0%}", line["nodes"], line["trees"]
        rate = speed(line, report["platform"] == "gpu")
        print(f"  {share:>4} right, {nodes:2} nodes, {kind:7} {line['tokens_per_step']:5.2f} tokens per step{rate}")
    if options.json:
        write_json(options.json, report)
    if report["differing_tokens"] or report["differing_bytes"]:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
