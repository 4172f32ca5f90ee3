"""The loop of decode steps, plain or with a draft: one `lax.while_loop` that never asks the host."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from muse_jax.decode import GRAPH_OPTIONS, DecodeState, DecodeWeights, StepOutput
from muse_jax.kept import Kept, keep, no_tokens
from muse_jax.mesh import replicated
from muse_jax.sampling import Choice
from muse_jax.speculative import Draft, pick, speculative_step


@functools.partial(jax.jit, static_argnames=("space", "logprobs", "drafted"))
def begin(
    weights: DecodeWeights,
    lengths: jax.Array,
    first: StepOutput,
    stops: jax.Array,
    choice: Choice | None,
    max_new_tokens: jax.Array,
    *,
    space: int,
    logprobs: int | None,
    drafted: bool,
) -> Kept:
    """The first token of every sequence, which the prefill decided.

    Args:
        weights: the target's.
        lengths: int32 [B], of the prompts.
        first: output after each prompt's last token.
        stops: int32 [S], ids that end a sequence.
        choice: options and keys of the B sequences; None: greedy.
        max_new_tokens: int32 [], of each sequence.
        space: at least as many.
        logprobs: as in `muse_jax.generate`.
        drafted: keep what each step brings.
    """
    token, values = pick(weights, first, lengths, choice, logprobs)
    token = jnp.where(first.nan, 0, token)
    empty = no_tokens(len(lengths), max_new_tokens, space, logprobs, drafted)
    new = (~first.nan).astype(jnp.int32)
    kept = keep(empty, stops, token, token[:, None], new, first.nan, tuple(v[:, None] for v in values))
    return lax.with_sharding_constraint(kept, replicated(weights.mesh))


@functools.partial(jax.jit, donate_argnames=("state", "carry"), compiler_options=GRAPH_OPTIONS)
def advance(
    weights: DecodeWeights,
    state: DecodeState,
    kept: Kept,
    stops: jax.Array,
    choice: Choice | None,
    draft: Draft,
    carry: Any,
    until: jax.Array,
) -> tuple[Kept, DecodeState, Any]:
    """Steps until every sequence has ended or so many steps are done; the tokens do not depend on the draft.

    Args:
        weights, state: the target's, after the prompts or after the last call; the state has `draft.width` - 1 slots
            more than the longest sequence will have tokens, or its capacity cuts trees short.
        kept: from `begin` or the last call.
        stops, choice: as given to `begin`.
        draft, carry: the draft and its state, which has seen what the state holds; NoDraft() and () without a draft.
        until: int32 [], steps since the prefill.

    Returns:
        (what was kept, state, carry), with which the loop goes on where it was left.
    """

    def body(loop):
        kept, state, carry = loop
        with jax.named_scope("muse_step"):
            new, state, carry = speculative_step(
                weights, state, draft, carry, kept.token, kept.active, choice, kept.logprobs
            )
        accepted = kept.accepted
        if accepted is not None:
            accepted = accepted.at[:, kept.steps].set(jnp.where(kept.active, new.count, -1))
        kept = keep(kept, stops, new.token, new.tokens, new.count, new.nan, new.values)
        return dataclasses.replace(kept, steps=kept.steps + 1, accepted=accepted), state, carry

    def unfinished(loop):
        kept = loop[0]
        return (kept.steps < until) & jnp.any(kept.active)

    kept, state, carry = lax.while_loop(unfinished, body, (kept, state, carry))
    # As they came, so that the next call finds this program.
    whole = replicated(weights.mesh)
    lengths = lax.with_sharding_constraint(state.lengths, whole)
    return lax.with_sharding_constraint(kept, whole), dataclasses.replace(state, lengths=lengths), carry
