"""Greedy generation: the whole loop is one `lax.while_loop` of fused decode steps, on GPUs one CUDA graph."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from muse_jax.decode import (
    GRAPH_OPTIONS,
    DecodeState,
    DecodeWeights,
    StepOutput,
    as_prompts,
    decode_step,
    init_state,
    prefill,
)
from muse_jax.guarantee import guarantee

if TYPE_CHECKING:
    from muse_jax.language_model import LanguageModel

FINISH_REASONS = ("length", "stop", "nan")


@dataclasses.dataclass(frozen=True)
class Generation:
    """What `generate` returns."""

    tokens: list[list[int]]
    """Generated ids of each sequence, the stop id included."""
    finish_reasons: list[str]
    """"stop" (a stop id), "length" (max_new_tokens), or "nan" (the logits were NaN; that token is not kept)."""
    steps: int
    """Decode steps after the prefill."""
    guarantee: str
    """`muse_jax.guarantee` of the model's devices: "bitwise", or "not bitwise: ..."."""


def generate(
    model: "LanguageModel",
    prompt_ids: Sequence[int] | Sequence[Sequence[int]],
    *,
    max_new_tokens: int = 64,
    stop_ids: Sequence[int] | None = None,
) -> Generation:
    """Continue prompts greedily.

    A prompt's continuation has the same bits whatever the batch, its order and the mesh.

    Args:
        model: a loaded model.
        prompt_ids: token ids of one prompt, or of up to 64 prompts of any lengths.
        max_new_tokens: at least 1.
        stop_ids: ids that end a sequence; the configuration's eos_token_ids by default.

    Raises:
        ValueError: an empty prompt, ids out of range, or prompt and new tokens beyond max_position_embeddings.
    """
    prompts = as_prompts(prompt_ids)
    stops = tuple(model.config.eos_token_ids if stop_ids is None else np.atleast_1d(np.asarray(stop_ids)).tolist())
    _check(model, prompts, max_new_tokens, stops)
    state = init_state(model.config, model.mesh, batch=len(prompts), capacity=max(map(len, prompts)) + max_new_tokens)
    first, state = prefill(model.weights, state, prompts)
    out, reasons, counts, steps, _ = _loop(model.weights, state, first, jnp.asarray(stops, jnp.int32), max_new_tokens)
    out, reasons, counts = np.asarray(out), np.asarray(reasons), np.asarray(counts)
    model.weights.communicator.check()
    return Generation(
        tokens=[row[:n].tolist() for row, n in zip(out, counts, strict=True)],
        finish_reasons=[FINISH_REASONS[r] for r in reasons],
        steps=int(steps),
        guarantee=guarantee(model.mesh),
    )


@functools.partial(
    jax.jit, static_argnames=("max_new_tokens",), donate_argnames=("state",), compiler_options=GRAPH_OPTIONS
)
def _loop(weights: DecodeWeights, state: DecodeState, first: StepOutput, stops: jax.Array, max_new_tokens: int):
    """Returns (ids [B, max_new], reason [B], kept ids [B], steps, state: returned so that its buffers are reused)."""
    batch = state.batch

    def keep(i, output: StepOutput, active, out, reason, count):
        """Record step i's tokens; decide who goes on."""
        kept = active & ~output.nan
        stop = kept & jnp.any(output.token[:, None] == stops[None, :], axis=1)
        out = out.at[:, i].set(jnp.where(kept, output.token, -1))
        reason = jnp.where(active & output.nan, 2, jnp.where(stop, 1, reason))
        return kept & ~stop, out, reason, count + kept

    def body(carry):
        i, state, token, active, out, reason, count = carry
        output, state = decode_step(weights, state, token, active)
        return i + 1, state, output.token, *keep(i, output, active, out, reason, count)

    def unfinished(carry):
        i, _, _, active, *_ = carry
        return (i < max_new_tokens) & jnp.any(active)

    zeros = jnp.zeros(batch, jnp.int32)
    empty = jnp.full((batch, max_new_tokens), -1, jnp.int32)
    kept = keep(0, first, jnp.ones(batch, bool), empty, zeros, zeros)
    i, state, _, _, out, reason, count = lax.while_loop(unfinished, body, (jnp.int32(1), state, first.token, *kept))
    return out, reason, count, i - 1, state


def _check(model: "LanguageModel", prompts: list[list[int]], max_new_tokens: int, stops: Sequence[int]) -> None:
    vocab, limit = model.config.vocab_size, model.config.max_position_embeddings
    if not isinstance(max_new_tokens, int | np.integer) or max_new_tokens < 1:
        raise ValueError(f"max_new_tokens is {max_new_tokens}, allowed: whole numbers from 1 on")
    if not prompts:
        raise ValueError("prompt_ids is empty; give at least one token id")
    for b, prompt in enumerate(prompts):
        if not prompt:
            raise ValueError(f"prompt {b} is empty; start it with the beginning-of-text id {model.config.bos_token_id}")
        if len(prompt) + max_new_tokens > limit:
            raise ValueError(
                f"prompt {b} has {len(prompt)} tokens and max_new_tokens is {max_new_tokens}, together more than the "
                f"model's {limit} positions (max_position_embeddings)"
            )
    for stop in stops:
        if not isinstance(stop, int) or not 0 <= stop < vocab:
            raise ValueError(f"stop id {stop} is not a token, allowed: 0 to {vocab - 1}")
