"""One step: a draft proposes trees, the target verifies them, what it would have chosen itself is committed."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from muse_jax.decode import DecodeState, DecodeWeights, StepOutput, Taps, run_step
from muse_jax.mesh import on_gpu
from muse_jax.sampling import Choice, choose, log_probs
from muse_jax.speculative.accept import accept
from muse_jax.speculative.draft import Draft, Seen


@dataclasses.dataclass(frozen=True)
class Verified:
    """What a step brought B sequences, from trees of W nodes. A pytree."""

    tokens: jax.Array
    """int32 [B, W]: the new tokens, `count` of them."""
    count: jax.Array
    """int32 [B]: 1 to W, or 0 where the logits after the root are NaN; of an inactive sequence nothing counts."""
    nan: jax.Array
    """bool [B]: the logits after the last new token are NaN, so that nothing follows."""
    token: jax.Array
    """int32 [B]: the last new token, the next root; 0 where nothing follows."""
    path: jax.Array
    """int32 [B, W]: the nodes behind which the new tokens come."""
    values: tuple[jax.Array, ...]
    """What `pick` says about the tokens, [B, W, ...] each."""
    output: StepOutput
    """Of all B W rows; row b W + i is node i of sequence b."""
    taps: Taps | None
    """Likewise; None unless asked for or needed by the draft."""


jax.tree_util.register_dataclass(Verified, [f.name for f in dataclasses.fields(Verified)], [])


def speculative_step(
    weights: DecodeWeights,
    state: DecodeState,
    draft: Draft,
    carry: tuple[Any, Seen] | tuple[()],
    token: jax.Array,
    active: jax.Array,
    choice: Choice | None = None,
    logprobs: int | None = None,
    *,
    taps: bool = False,
) -> tuple[Verified, DecodeState, tuple[Any, Seen] | tuple[()]]:
    """One step of the target for every sequence, plain (`NoDraft`) or speculative.

    Args:
        weights: the target's.
        state: the target's; donate it.
        draft: proposes the tree.
        carry: (the draft's state, what the last step committed), which together are all committed tokens; () for
            `NoDraft`.
        token: int32 [B], the newest token of each sequence, whose K and V are not cached yet.
        active: bool [B]; other sequences cost nothing and stay as they are.
        choice: options and keys of the B sequences; None: greedy.
        logprobs: as in `muse_jax.generate`.
        taps: return taps even if the draft needs none.

    Returns:
        (what it brought, state, carry).
    """
    batch, width = state.batch, draft.width
    inner, seen = carry or ((), Seen.none(draft, batch, weights.config.hidden_size))
    tree, inner = draft.propose(inner, seen, token, state.lengths)
    # A node's slot is at most its number behind the committed ones, and so is its position.
    there = active[:, None] & (state.lengths[:, None] + jnp.arange(width, dtype=jnp.int32) < state.capacity)
    rows = tree.rows(state.lengths, there)
    output, state, tapped = run_step(weights, state, rows, taps=taps or bool(draft.tap_layers))
    behind = (state.lengths[:, None] + tree.depth + 1).reshape(-1)
    of_nodes = jax.tree.map(lambda x: jnp.repeat(x, width, axis=0), choice)
    chosen, values = pick(weights, output, behind, of_nodes, logprobs)
    accepted, state = accept(state, tree, chosen, output.nan, active, tapped, draft.tap_layers)

    def on_path(x):
        """[B W, ...] -> [B, W, ...], by depth."""
        x = x.reshape(batch, width, *x.shape[1:])
        return jnp.take_along_axis(x, accepted.path.reshape(batch, width, *[1] * (x.ndim - 2)), axis=1)

    verified = Verified(
        tokens=accepted.follows,
        count=accepted.count,
        nan=accepted.nan,
        token=accepted.token,
        path=accepted.path,
        values=tuple(on_path(v) for v in values),
        output=output,
        taps=tapped,
    )
    return verified, state, (inner, accepted.seen) if carry else ()


def pick(
    weights: DecodeWeights, output: StepOutput, position: jax.Array, choice: Choice | None, logprobs: int | None
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    """The token that follows each of T rows.

    Args:
        weights: the model's, for its mesh.
        output: what the head said of the rows.
        position: int32 [T], that the tokens will have.
        choice: options and keys of T rows; None: greedy.
        logprobs: as in `muse_jax.generate`.

    Returns:
        (tokens [T], what `muse_jax.sampling.log_probs` says about them, or nothing).
    """
    if choice is None and logprobs is None:
        return output.token, ()

    def call(bits, token, position, choice):
        logits = lax.bitcast_convert_type(bits, jnp.float32)
        if choice is not None:
            token = choose(logits, choice, position, unroll=on_gpu(weights.mesh))
        return token, () if logprobs is None else log_probs(logits, token, logprobs)

    # Every device has whole rows and does the same. They travel as integers (docs/numerics.md 9).
    with jax.named_scope("muse_sampling"):
        return jax.shard_map(
            call, mesh=weights.mesh, in_specs=PartitionSpec(), out_specs=PartitionSpec(), check_vma=False
        )(lax.bitcast_convert_type(output.logits, jnp.uint32), output.token, position, choice)
