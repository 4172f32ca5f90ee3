"""Generation, greedy or sampled: one `lax.while_loop` of fused decode steps, on GPUs one CUDA graph."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from muse_jax.decode import (
    GRAPH_OPTIONS,
    MAX_ROWS,
    DecodeState,
    DecodeWeights,
    StepOutput,
    as_prompts,
    decode_step,
    init_state,
    prefill,
)
from muse_jax.guarantee import guarantee
from muse_jax.kept import VALUES, Kept, no_tokens, pick
from muse_jax.sampling import MAX_LOGPROBS, Choice, Sampling, as_choice
from muse_jax.speculative import Draft, prefill_both, speculative_loop

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
    accepted: list[int] | None = None
    """With a draft: how often a step brought a sequence 0, 1, ... W tokens, those that a stop id or the budget cut off
    included."""

    @property
    def tokens_per_step(self) -> float | None:
        """With a draft: tokens that a step brought a sequence, on average."""
        if not self.accepted or not sum(self.accepted):
            return None
        return sum(n * times for n, times in enumerate(self.accepted)) / sum(self.accepted)


def generate(
    model: "LanguageModel",
    prompt_ids: Sequence[int] | Sequence[Sequence[int]],
    *,
    max_new_tokens: int = 64,
    stop_ids: Sequence[int] | None = None,
    sampling: Sampling | Sequence[Sampling] | None = None,
    keys: Any = None,
    logprobs: int | None = None,
    draft: Draft | None = None,
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
        draft: proposes tokens, of which a step keeps those that the model itself would have chosen: the same text and
            log-probabilities in fewer steps.

    Raises:
        ValueError: an empty prompt, ids out of range, options or keys that do not fit, prompt and new tokens beyond
            max_position_embeddings, or more tree nodes than a step has rows.
    """
    prompts = as_prompts(prompt_ids)
    stops = tuple(model.config.eos_token_ids if stop_ids is None else np.atleast_1d(np.asarray(stop_ids)).tolist())
    _check(model, prompts, max_new_tokens, stops, logprobs)
    if draft is not None and not 1 <= draft.width <= MAX_ROWS // len(prompts):
        raise ValueError(
            f"the draft's trees have {draft.width} nodes, allowed for {len(prompts)} prompts: "
            f"1 to {MAX_ROWS // len(prompts)} (a step has {MAX_ROWS} rows)"
        )
    choice = as_choice(sampling, keys, batch=len(prompts), vocab=model.config.vocab_size)
    stop_array = jnp.asarray(stops, jnp.int32)
    longest = max(map(len, prompts)) + max_new_tokens
    if draft is None:
        state = init_state(model.config, model.mesh, batch=len(prompts), capacity=longest)
        first, state = prefill(model.weights, state, prompts)
        kept, steps, _ = _loop(model.weights, state, first, stop_array, choice, max_new_tokens, logprobs)
        accepted = None
    else:
        capacity = min(longest + draft.width, model.config.max_position_embeddings)
        state = init_state(model.config, model.mesh, batch=len(prompts), capacity=capacity)
        first, state, carry = prefill_both(model.weights, state, prompts, draft)
        kept, done, _, _ = speculative_loop(
            model.weights, state, first, stop_array, choice, draft, carry, max_new_tokens, logprobs
        )
        steps, accepted = done.steps, np.asarray(done.accepted).tolist()
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
        accepted=accepted,
    )


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

    def keep(i, output: StepOutput, position, kept: Kept) -> tuple[jax.Array, Kept]:
        """Choose and record step i's tokens; decide who goes on."""
        token, values = pick(weights, output, position, choice, logprobs)
        new = kept.active & ~output.nan
        stop = new & jnp.any(token[:, None] == stops[None, :], axis=1)
        gathered = {name: getattr(kept, name).at[:, i].set(value) for name, value in zip(VALUES, values, strict=False)}
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

    empty = no_tokens(batch, max_new_tokens, logprobs)
    start = keep(0, first, state.lengths, empty)
    i, state, _, kept = lax.while_loop(unfinished, body, (jnp.int32(1), state, *start))
    return kept, i - 1, state


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
