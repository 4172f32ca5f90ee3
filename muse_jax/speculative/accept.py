"""What becomes of a verified tree: the path that the target itself would have taken, and the caches after it."""

import dataclasses

import jax
import jax.numpy as jnp

from muse_jax.decode import DecodeState
from muse_jax.decode.state import SPECS
from muse_jax.decode.weights import REPLICATED
from muse_jax.speculative.tree import TokenTree


@dataclasses.dataclass(frozen=True)
class Accepted:
    """Of B trees of W nodes each. A pytree."""

    path: jax.Array
    """int32 [B, W]: the node at each depth; behind the path's end it does not matter."""
    count: jax.Array
    """int32 [B]: nodes of the path, 1 to W: the tokens that may enter the caches."""
    tokens: jax.Array
    """int32 [B, W]: what follows each node of the path; `count` new tokens, the last of them the next root."""


jax.tree_util.register_dataclass(Accepted, ["path", "count", "tokens"], [])


def accept(tree: TokenTree, follows: jax.Array, active: jax.Array) -> Accepted:
    """The path from the root on which every node is what the target put there.

    Lossless for greedy and, with the target's own draws, for sampled tokens, whatever the tree.

    Args:
        tree: B trees.
        follows: int32 [B, W], the target's choice behind each node; -1 where nothing may follow.
        active: bool [B, W], the nodes that were computed; node 0 must be.
    """
    width = tree.width
    node = jnp.arange(width, dtype=jnp.int32)
    wanted = jnp.take_along_axis(follows, jnp.maximum(tree.parent, 0), axis=1)
    siblings = tree.parent[:, :, None] == tree.parent[:, None, :]
    again = jnp.any(
        siblings & (tree.token[:, :, None] == tree.token[:, None, :]) & (node[None, :] < node[:, None]), axis=2
    )
    right = active & (((tree.token == wanted) & ~again) | (node == 0))
    accepted = jnp.all(right[:, None, :] | ~tree.ancestors, axis=2)
    at_depth = accepted[:, None, :] & (tree.depth[:, None, :] == node[None, :, None])
    path = jnp.argmax(at_depth, axis=2).astype(jnp.int32)
    return Accepted(path, accepted.sum(axis=1, dtype=jnp.int32), jnp.take_along_axis(follows, path, axis=1))


def commit(state: DecodeState, accepted: Accepted, active: jax.Array) -> DecodeState:
    """Moves the path's keys and values to the positions they stand for, and counts them as committed.

    Node i lies in slot length + i, the node at depth r belongs in slot length + r; in sliding layers modulo the ring.
    Everything is read before anything is written: a slot may be the source of one move and the goal of another.

    Args:
        state: after the step that computed the trees; donate it.
        accepted: of each sequence.
        active: bool [B]: the others stay as they are.
    """
    count = jnp.where(active, accepted.count, 0)
    grown = dataclasses.replace(state, lengths=state.lengths + count)
    if accepted.path.shape[1] == 1:
        return grown
    depth = jnp.arange(1, accepted.path.shape[1], dtype=jnp.int32)  # the root is where it belongs
    path, moves = accepted.path[:, 1:], depth < count[:, None]

    def move(cache: jax.Array, lengths: jax.Array, path: jax.Array, moves: jax.Array) -> jax.Array:
        """[ranks, layers, B, heads, slots, 64]."""
        slots = cache.shape[4]

        def one(of_sequence, length, path, moves):
            source, goal = (length + path) % slots, (length + depth) % slots
            rows = jnp.take(of_sequence, source, axis=3)
            # Unmoved rows are left out of the scatter.
            return of_sequence.at[:, :, :, jnp.where(moves, goal, slots)].set(rows, mode="drop")

        return jax.vmap(one, in_axes=(2, 0, 0, 0), out_axes=2)(cache, lengths, path, moves)

    names = ("k_full", "v_full", "k_ring", "v_ring")
    with jax.named_scope("muse_commit"):
        moved = jax.shard_map(
            lambda *operands: tuple(move(cache, *operands[4:]) for cache in operands[:4]),
            mesh=state.mesh,
            in_specs=(*(SPECS[name] for name in names), REPLICATED, REPLICATED, REPLICATED),
            out_specs=tuple(SPECS[name] for name in names),
            check_vma=False,
        )(*(getattr(state, name) for name in names), state.lengths, path, moves)
    return dataclasses.replace(grown, **dict(zip(names, moved, strict=True)))
