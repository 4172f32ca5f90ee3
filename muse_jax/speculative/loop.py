"""Speculative decoding: draft, verify, accept, commit, in one `lax.while_loop` that never asks the host."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from muse_jax.decode import GRAPH_OPTIONS, DecodeState, DecodeWeights, StepOutput, run_head, run_layers
from muse_jax.kept import VALUES, Kept, no_tokens, pick
from muse_jax.sampling import Choice
from muse_jax.speculative.accept import accept, commit
from muse_jax.speculative.draft import Draft
from muse_jax.speculative.prompts import features


@dataclasses.dataclass(frozen=True)
class Counts:
    """Of all steps and sequences. A pytree."""

    accepted: jax.Array
    """int32 [W + 1]: how often a step brought a sequence so many tokens (before stop ids and budgets cut any)."""
    steps: jax.Array
    """int32 []: steps of the target."""


jax.tree_util.register_dataclass(Counts, ["accepted", "steps"], [])


@functools.partial(
    jax.jit,
    static_argnames=("max_new_tokens", "logprobs"),
    donate_argnames=("state", "carry"),
    compiler_options=GRAPH_OPTIONS,
)
def speculative_loop(
    weights: DecodeWeights,
    state: DecodeState,
    first: StepOutput,
    stops: jax.Array,
    choice: Choice | None,
    draft: Draft,
    carry: Any,
    max_new_tokens: int,
    logprobs: int | None,
) -> tuple[Kept, Counts, DecodeState, Any]:
    """Generate until every sequence has ended; the tokens are those of plain decoding.

    Args:
        weights, state: the target's, after the prefill; the state has `draft.width` slots more than the longest
            sequence will have tokens, or its capacity cuts trees short.
        first: output after each prompt's last token.
        stops: int32 [S].
        choice: options and keys of the B sequences; None: greedy.
        draft, carry: the draft and its state after the prompts.
        max_new_tokens: of each sequence.
        logprobs: as in `muse_jax.generate`.

    Returns:
        (what was kept, counts, state, carry: the last two so that their buffers are reused).
    """
    batch, width = state.batch, draft.width
    of_nodes = None if choice is None else jax.tree.map(lambda x: jnp.repeat(x, width, axis=0), choice)

    def keep(kept: Kept, tokens, count, nan, values) -> Kept:
        """Records `count` tokens [B, W]; nan: what would come next is not a number."""
        place = jnp.arange(tokens.shape[1], dtype=jnp.int32)
        room = max_new_tokens - kept.count
        n = jnp.minimum(count, room)
        stop = jnp.any(tokens[:, :, None] == stops, axis=2) & (place < n[:, None])
        stopped = jnp.any(stop, axis=1)
        n = jnp.where(kept.active, jnp.where(stopped, jnp.argmax(stop, axis=1) + 1, n), 0).astype(jnp.int32)
        ended = nan & ~stopped & (count < room)
        at = jnp.where(place < n[:, None], kept.count[:, None] + place, max_new_tokens)
        of = jnp.arange(batch)[:, None]
        gathered = {
            name: getattr(kept, name).at[of, at].set(value, mode="drop")
            for name, value in zip(VALUES, values, strict=False)
        }
        return dataclasses.replace(
            kept,
            active=kept.active & ~stopped & ~ended & (kept.count + n < max_new_tokens),
            tokens=kept.tokens.at[of, at].set(tokens, mode="drop"),
            reason=jnp.where(kept.active & ended, 2, jnp.where(kept.active & stopped, 1, kept.reason)),
            count=kept.count + n,
            **gathered,
        )

    def body(loop):
        state, token, kept, carry, counts = loop
        tree, carry = draft.propose(carry, token, state.lengths)
        # A node's slot is at most its number behind the committed ones, and so is its position.
        fits = state.lengths[:, None] + jnp.arange(width, dtype=jnp.int32) < state.capacity
        active = kept.active[:, None] & fits
        rows = tree.rows(state.lengths, active)
        stream, state, taps = run_layers(weights, state, rows, taps=bool(draft.tap_layers))
        output = run_head(weights, state, rows, stream)
        behind = (state.lengths[:, None] + tree.depth + 1).reshape(-1)
        chosen, values = pick(weights, output, behind, of_nodes, logprobs)
        chosen, nan = chosen.reshape(batch, width), output.nan.reshape(batch, width)
        accepted = accept(tree, jnp.where(nan | ~active, -1, chosen), active)
        last = jnp.take_along_axis(accepted.path, accepted.count[:, None] - 1, axis=1)
        ended = jnp.take_along_axis(nan, last, axis=1)[:, 0]

        def on_path(x):
            """[B W, ...] -> [B, W, ...], by depth."""
            x = x.reshape(batch, width, *x.shape[1:])
            return jnp.take_along_axis(x, accepted.path.reshape(batch, width, *[1] * (x.ndim - 2)), axis=1)

        going, lengths = kept.active, state.lengths
        kept = keep(kept, accepted.tokens, accepted.count - ended, ended, [on_path(v) for v in values])
        state = commit(state, accepted, going)
        seen = features(draft, weights, taps, batch * width)
        carry = draft.observe(carry, on_path(rows.token), on_path(seen), jnp.where(going, accepted.count, 0), lengths)
        token = jnp.take_along_axis(accepted.tokens, accepted.count[:, None] - 1, axis=1)[:, 0]
        token = jnp.where(ended | ~going, 0, token)
        counts = Counts(
            counts.accepted.at[jnp.where(going, accepted.count, width + 1)].add(1, mode="drop"), counts.steps + 1
        )
        return state, token, kept, carry, counts

    token, values = pick(weights, first, state.lengths, choice, logprobs)
    kept = keep(
        no_tokens(batch, max_new_tokens, logprobs),
        token[:, None], (~first.nan).astype(jnp.int32), first.nan, [v[:, None] for v in values],
    )  # fmt: skip
    token = jnp.where(first.nan, 0, token)
    counts = Counts(jnp.zeros(width + 1, jnp.int32), jnp.int32(0))
    state, _, kept, carry, counts = lax.while_loop(
        lambda loop: jnp.any(loop[2].active), body, (state, token, kept, carry, counts)
    )
    return kept, counts, state, carry
