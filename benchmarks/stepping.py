"""Decode steps of one rank of eight, looped and timed: what decode_step.py, timeline.py and baselines.py share.

A case is (rows, candidates, context): so many rows of one sequence, each layer's router choosing among so many experts
(drawn anew per layer and step), with so many positions in the caches.
"""

import argparse
import dataclasses
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from one_rank import one_rank_state, rank_bytes, routing
from released import slice_config

from muse_jax import MuseSparkConfig, decode
from muse_jax.decode import DecodeState, DecodeWeights

LOOPBACK = (
    "ONE rank of eight, whose seven peers are played by itself (loopback): it computes, reads and stores what it\n"
    "would among eight, but no link is crossed and nobody else is waited for. A benchmark: the text is meaningless."
)
RELEASED_LAYERS = 62
SLACK = 64  # positions of capacity beyond the context, for the rows
WAIT_LIMIT = 2.0  # seconds; a step takes milliseconds


@dataclasses.dataclass(frozen=True)
class Case:
    """One workload of one rank."""

    rows: int
    """Rows of the step, 1 to 64: a chain of one sequence."""
    candidates: int
    """Experts of a layer among which the rows' own scores choose."""
    context: int
    """Committed positions before the rows."""

    def __str__(self) -> str:
        """For printing."""
        return f"{self.rows} row{'s' * (self.rows > 1)}, {self.candidates} candidate experts, context {self.context:,}"

    @classmethod
    def parse(cls, text: str) -> "Case":
        """ROWS:CANDIDATES:CONTEXT, such as 16:52:8k; k is 1024."""
        try:
            rows, candidates, context = text.split(":")
            positions = int(context[:-1]) * 1024 if context[-1:] in ("k", "K") else int(context)
            case = cls(int(rows), int(candidates), positions)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not ROWS:CANDIDATES:CONTEXT, such as 16:52:8k") from None
        config = MuseSparkConfig.released()
        least, most = config.num_experts_per_tok, config.num_local_experts
        longest = config.max_position_embeddings - SLACK
        for name, value, low, high in (
            ("rows", case.rows, 1, decode.MAX_ROWS),
            ("candidates", case.candidates, least, most),
            ("context", case.context, 0, longest),
        ):
            if not low <= value <= high:
                raise argparse.ArgumentTypeError(f"{text!r}: {name} is {value}, allowed: {low} to {high}")
        return case


# Of 52 candidates, 16 rows of 8 choices hit 49 or so, as 16 rows of the release do.
CASES = [Case(rows, candidates, context) for rows, candidates in ((16, 52), (1, 8)) for context in (1024, 8192, 131072)]


@dataclasses.dataclass(frozen=True)
class Times:
    """Seconds of one step, over repetitions."""

    median: float
    spread: float
    """Slowest less fastest repetition."""


def gpus() -> list[Any]:
    """The GPUs of this process, or a plain word."""
    try:
        return jax.devices("gpu")
    except RuntimeError as error:
        raise SystemExit(f"this benchmark needs an NVIDIA GPU: {str(error).splitlines()[0]}") from None


def layer_count(text: str) -> int:
    """For argparse: how many layers of the release."""
    if not text.isdecimal() or not 1 <= int(text) <= RELEASED_LAYERS:
        raise argparse.ArgumentTypeError(f"{text!r}: allowed are 1 to {RELEASED_LAYERS} layers")
    return int(text)


def step_count(text: str) -> int:
    """For argparse: how many steps or repetitions."""
    if not text.isdecimal() or not 2 <= int(text) <= 10000:
        raise argparse.ArgumentTypeError(f"{text!r}: allowed are 2 to 10000")
    return int(text)


def share(text: str) -> float:
    """For argparse: a number from 0 to 1."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"{text!r}: allowed are 0 to 1")
    return value


def released_config(layers: int) -> MuseSparkConfig:
    """The whole released model, or its layers 1 to `layers` (NVFP4 experts in all)."""
    return MuseSparkConfig.released() if layers == RELEASED_LAYERS else slice_config(layers)


def describe(config: MuseSparkConfig) -> str:
    """Which layers of the release these are."""
    if config.num_hidden_layers == RELEASED_LAYERS:
        return "all 62 layers of the release, experts of the first and the last bf16, of the others NVFP4"
    return f"a slice of {config.num_hidden_layers} of the release's 62 layers, all NVFP4"


def timed(run: Callable[[], Any], repeats: int, steps: int) -> Times:
    """Times of `run`, which makes `steps` steps and returns what to block on; two more runs first: XLA compiles in one
    and records CUDA graphs in the next."""
    times = []
    for _ in range(repeats + 2):
        begin = time.perf_counter()
        jax.block_until_ready(run())
        times.append((time.perf_counter() - begin) / steps)
    return Times(float(np.median(times[2:])), max(times[2:]) - min(times[2:]))


class Steps:
    """One case on one rank's weights: consecutive steps with their own routing, compiled into one program each way."""

    def __init__(self, weights: DecodeWeights, case: Case, *, steps: int, overlap: float, seed: int = 0):
        """Draw the routing and fill the caches; `overlap` of a layer's candidates stay from step to step."""
        config = weights.config
        self.weights, self.case, self.steps = weights, case, steps
        self.state: DecodeState = one_rank_state(weights, case.context, case.context + SLACK)
        bias = routing(config, case.candidates, steps, overlap, seed)
        self.overlap = reuse(bias > -1)  # what it came to: more than asked for where there are few others to draw
        self.bias = jax.device_put(bias, weights.router_bias.sharding)
        # Tokens of the rank's own share of the vocabulary: only that is here.
        tokens = np.random.default_rng(seed).integers(0, config.vocab_size // 8, case.rows).tolist()
        self.rows = decode.tree_rows(tokens, [-1, *range(case.rows - 1)], length=case.context)
        self._hits: np.ndarray | None = None

    def _layers(self, weights: DecodeWeights, state: DecodeState, bias: jax.Array, taps: bool = False):
        routed = dataclasses.replace(weights, router_bias=bias)
        return decode.run_layers(routed, state, self.rows, taps=taps, wait_limit=WAIT_LIMIT)

    def hits(self) -> np.ndarray:
        """bool [steps, L, E]: the experts that each step of the loop really uses, from a run with taps.

        The rows are not committed, so that every repetition of the loop makes the same steps.
        """
        if self._hits is None:
            run = jax.jit(lambda w, s, b: self._layers(w, s, b, taps=True), donate_argnums=1)
            config = self.weights.config
            self._hits = np.zeros((self.steps, config.num_hidden_layers, config.num_local_experts), bool)
            for hit, bias in zip(self._hits, self.bias, strict=True):
                stream, self.state, taps = run(self.weights, self.state, bias)
                for layer, experts in enumerate(np.asarray(taps.experts)):
                    hit[layer, experts.ravel()] = True
                if not np.isfinite(np.asarray(stream)).all():
                    raise SystemExit(f"{self.case}: the residual stream is not finite; the weights are unsuitable")
        return self._hits

    def bytes_by_kind(self) -> dict[str, float]:
        """Bytes that a step must read, the mean over the loop's steps."""
        distinct = self.hits().sum(axis=2).mean(axis=0)
        return rank_bytes(self.weights.config, distinct, self.case.context, self.case.rows)

    def time(self, repeats: int, *, head: bool) -> Times:
        """Times of one step: the layers alone, or with the head."""

        def body(i, carry, weights, biases):
            state, token = carry
            if not head:
                return self._layers(weights, state, biases[i])[1], token
            routed = dataclasses.replace(weights, router_bias=biases[i])
            output, state, _ = decode.run_step(routed, state, self.rows, wait_limit=WAIT_LIMIT)
            return state, output.token

        def loop(weights, state, token, biases):
            return jax.lax.fori_loop(0, self.steps, lambda i, c: body(i, c, weights, biases), (state, token))

        compiled = jax.jit(loop, donate_argnums=1)
        token = jnp.zeros(self.case.rows, jnp.int32)

        def run() -> tuple[jax.Array, jax.Array]:
            nonlocal token
            self.state, token = compiled(self.weights, self.state, token, self.bias)
            return self.state.epoch, token

        times = timed(run, repeats, self.steps)
        self.weights.communicator.check()
        return times


def reuse(hits: np.ndarray) -> float:
    """The share of a step's experts that the step before had in the same layer; hits bool [steps, L, E]."""
    return float((hits[1:] & hits[:-1]).sum() / max(hits[1:].sum(), 1))


def write_json(path: Path, result: dict[str, Any]) -> None:
    """Write a result and say where."""
    path.write_text(json.dumps(result, indent=1) + "\n")
    print(f"written: {path}")
