"""Generation, greedy or sampled: one `lax.while_loop` of fused decode steps, on GPUs one CUDA graph."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec

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
from muse_jax.sampling import MAX_LOGPROBS, Choice, Sampling, as_choice, choose, log_probs

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
    log_probs: list[np.ndarray] | None = None
    """fp32 [n] of each sequence: log-probability of each of its n tokens by the model alone, the reference's bits."""
    top_tokens: list[np.ndarray] | None = None
    """int32 [n, logprobs]: the most probable tokens in each one's place, ties to the lowest ids."""
    top_log_probs: list[np.ndarray] | None = None
    """fp32 [n, logprobs]: theirs."""


def generate(
    model: "LanguageModel",
    prompt_ids: Sequence[int] | Sequence[Sequence[int]],
    *,
    max_new_tokens: int = 64,
    stop_ids: Sequence[int] | None = None,
    sampling: Sampling | Sequence[Sampling] | None = None,
    keys: Any = None,
    logprobs: int | None = None,
) -> Generation:
    """Continue prompts, greedily unless `sampling` says otherwise.

    A prompt's continuation has the same bits whatever the batch, its order and the mesh; a sampled one depends on the
    prompt, its options and its key alone.

    Args:
        model: a loaded model.
        prompt_ids: token ids of one prompt, or of up to 64 prompts of any lengths.
        max_new_tokens: at least 1.
        stop_ids: ids that end a sequence; the configuration's eos_token_ids by default.
        sampling: options for all prompts, or one per prompt.
        keys: one JAX key per prompt (threefry2x32), where anything is sampled.
        logprobs: also return log-probabilities, of the tokens (0) and of so many most probable ones at each place.

    Raises:
        ValueError: an empty prompt, ids out of range, options or keys that do not fit, or prompt and new tokens beyond
            max_position_embeddings.
    """
    prompts = as_prompts(prompt_ids)
    stops = tuple(model.config.eos_token_ids if stop_ids is None else np.atleast_1d(np.asarray(stop_ids)).tolist())
    _check(model, prompts, max_new_tokens, stops, logprobs)
    choice = as_choice(sampling, keys, batch=len(prompts), vocab=model.config.vocab_size)
    state = init_state(model.config, model.mesh, batch=len(prompts), capacity=max(map(len, prompts)) + max_new_tokens)
    first, state = prefill(model.weights, state, prompts)
    stop_array = jnp.asarray(stops, jnp.int32)
    kept, steps, _ = _loop(model.weights, state, first, stop_array, choice, max_new_tokens, logprobs)
    kept = jax.tree.map(np.asarray, kept)
    model.weights.communicator.check()
    counts = kept.count

    def texts(rows: np.ndarray | None) -> list[np.ndarray] | None:
        return None if rows is None else [row[:n] for row, n in zip(rows, counts, strict=True)]

    return Generation(
        tokens=[row[:n].tolist() for row, n in zip(kept.tokens, counts, strict=True)],
        finish_reasons=[FINISH_REASONS[r] for r in kept.reason],
        steps=int(steps),
        guarantee=guarantee(model.mesh),
        log_probs=texts(kept.log_probs),
        top_tokens=texts(kept.top_tokens) if logprobs else None,
        top_log_probs=texts(kept.top_log_probs) if logprobs else None,
    )


@dataclasses.dataclass(frozen=True)
class _Kept:
    """What the loop has gathered of B sequences."""

    active: jax.Array
    """bool [B]."""
    tokens: jax.Array
    """int32 [B, max_new_tokens]."""
    reason: jax.Array
    """int32 [B], into FINISH_REASONS."""
    count: jax.Array
    """int32 [B]."""
    log_probs: jax.Array | None
    """fp32 [B, max_new_tokens]."""
    top_tokens: jax.Array | None
    """int32 [B, max_new_tokens, top]."""
    top_log_probs: jax.Array | None
    """fp32 [B, max_new_tokens, top]."""


jax.tree_util.register_dataclass(_Kept, [f.name for f in dataclasses.fields(_Kept)], [])


@functools.partial(
    jax.jit,
    static_argnames=("max_new_tokens", "logprobs"),
    donate_argnames=("state",),
    compiler_options=GRAPH_OPTIONS,
)
def _loop(
    weights: DecodeWeights,
    state: DecodeState,
    first: StepOutput,
    stops: jax.Array,
    choice: Choice | None,
    max_new_tokens: int,
    logprobs: int | None,
):
    """Returns (kept, steps, state: returned so that its buffers are reused)."""
    batch = state.batch

    def keep(i, output: StepOutput, position, kept: _Kept) -> tuple[jax.Array, _Kept]:
        """Choose and record step i's tokens; decide who goes on."""
        token, values = _pick(weights, output, position, choice, logprobs)
        new = kept.active & ~output.nan
        stop = new & jnp.any(token[:, None] == stops[None, :], axis=1)
        gathered = {
            name: getattr(kept, name).at[:, i].set(value)
            for name, value in zip(("log_probs", "top_tokens", "top_log_probs"), values, strict=False)
        }
        return token, dataclasses.replace(
            kept,
            active=new & ~stop,
            tokens=kept.tokens.at[:, i].set(jnp.where(new, token, -1)),
            reason=jnp.where(kept.active & output.nan, 2, jnp.where(stop, 1, kept.reason)),
            count=kept.count + new,
            **gathered,
        )

    def body(carry):
        i, state, token, kept = carry
        output, state = decode_step(weights, state, token, kept.active)
        return i + 1, state, *keep(i, output, state.lengths, kept)

    def unfinished(carry):
        i, _, _, kept = carry
        return (i < max_new_tokens) & jnp.any(kept.active)

    zeros = jnp.zeros(batch, jnp.int32)
    space = (batch, max_new_tokens)
    empty = _Kept(
        active=jnp.ones(batch, bool),
        tokens=jnp.full(space, -1, jnp.int32),
        reason=zeros,
        count=zeros,
        log_probs=None if logprobs is None else jnp.zeros(space, jnp.float32),
        top_tokens=None if logprobs is None else jnp.zeros((*space, logprobs), jnp.int32),
        top_log_probs=None if logprobs is None else jnp.zeros((*space, logprobs), jnp.float32),
    )
    start = keep(0, first, state.lengths, empty)
    i, state, _, kept = lax.while_loop(unfinished, body, (jnp.int32(1), state, *start))
    return kept, i - 1, state


def _pick(weights: DecodeWeights, output: StepOutput, position, choice: Choice | None, logprobs: int | None):
    """(tokens [B], what `log_probs` says about them, or nothing)."""
    if choice is None and logprobs is None:
        return output.token, ()

    def call(bits, token, position, choice):
        logits = lax.bitcast_convert_type(bits, jnp.float32)
        if choice is not None:
            token = choose(logits, choice, position)
        return token, () if logprobs is None else log_probs(logits, token, logprobs)

    # Every device has whole rows and does the same. They travel as integers (docs/numerics.md 9).
    with jax.named_scope("muse_sampling"):
        return jax.shard_map(
            call, mesh=weights.mesh, in_specs=PartitionSpec(), out_specs=PartitionSpec(), check_vma=False
        )(lax.bitcast_convert_type(output.logits, jnp.uint32), output.token, position, choice)


def _check(
    model: "LanguageModel",
    prompts: list[list[int]],
    max_new_tokens: int,
    stops: Sequence[int],
    logprobs: int | None,
) -> None:
    if logprobs is not None and (
        isinstance(logprobs, bool)
        or not isinstance(logprobs, int | np.integer)
        or not 0 <= logprobs <= min(MAX_LOGPROBS, model.config.vocab_size)
    ):
        raise ValueError(
            f"logprobs is {logprobs}, allowed: 0 (the tokens' own alone) to {MAX_LOGPROBS}, or None to leave them out"
        )
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
