"""Rows: what one step computes. A chain, a draft tree, one token each for a batch, or any mixture."""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

MAX_ROWS = 64
"""Rows of one step (kMaxRows in ffi/decode/plan.h)."""


@dataclasses.dataclass(frozen=True)
class Rows:
    """T rows of one step (docs/architecture.md, "Rows"). A pytree."""

    token: jax.Array | np.ndarray
    """int32 [T], 0 to V-1."""
    sequence: jax.Array | np.ndarray
    """int32 [T], 0 to B-1, or -1: the row is inactive, costs nothing and yields zeros."""
    position: jax.Array | np.ndarray
    """int32 [T]: committed length of the sequence plus depth in the tree."""
    ancestors: jax.Array | np.ndarray
    """bool [T, T]: row u is visible to row t; exactly one row per position from the committed length to t's own."""


jax.tree_util.register_dataclass(Rows, ["token", "sequence", "position", "ancestors"], [])


def next_rows(lengths: jax.Array, tokens: jax.Array, active: jax.Array | None = None) -> Rows:
    """One new token for each of B sequences.

    Args:
        lengths: int32 [B], committed lengths (`DecodeState.lengths`).
        tokens: int32 [B].
        active: bool [B]; a sequence that is not active gets an inactive row. All by default.
    """
    batch = tokens.shape[0]
    sequence = jnp.arange(batch, dtype=jnp.int32)
    if active is not None:
        sequence = jnp.where(active, sequence, -1)
    return Rows(tokens.astype(jnp.int32), sequence, lengths, jnp.eye(batch, dtype=bool))


def chain_rows(tokens: Sequence[int], sequence: Sequence[int], position: Sequence[int], size: int) -> Rows:
    """Consecutive tokens of one or more sequences (prefill), padded with inactive rows to `size` rows. Host arrays."""
    count = len(tokens)
    seq = np.full(size, -1, np.int32)
    seq[:count] = sequence
    token, pos = np.zeros(size, np.int32), np.zeros(size, np.int32)
    token[:count], pos[:count] = tokens, position
    same = (seq[:, None] == seq[None, :]) & (seq[:, None] >= 0)
    ancestors = same & (np.arange(size)[None, :] <= np.arange(size)[:, None])
    return Rows(token, seq, pos, ancestors)


def tree_rows(tokens: Sequence[int], parents: Sequence[int], *, length: int, sequence: int = 0) -> Rows:
    """A draft tree of one sequence.

    Args:
        tokens: one per node; node 0 is the newest token, whose K and V are not in the cache yet.
        parents: index of each node's parent, smaller than its own; -1 for a root.
        length: committed length of the sequence; a root stands at this position.
        sequence: which sequence.

    Raises:
        ValueError: no or too many nodes, or a parent that does not come before its child.
    """
    count = len(tokens)
    if not 1 <= count <= MAX_ROWS or len(parents) != count:
        raise ValueError(f"a tree needs 1 to {MAX_ROWS} tokens and as many parents, got {count} and {len(parents)}")
    ids = np.asarray(tokens)
    if not np.issubdtype(ids.dtype, np.integer) or (ids < 0).any() or (ids > np.iinfo(np.int32).max).any():
        raise ValueError(f"tokens is {list(tokens)}, expected token ids: whole numbers from 0 on")
    ancestors = np.eye(count, dtype=bool)
    position = np.full(count, length, np.int32)
    for node, parent in enumerate(parents):
        if not -1 <= parent < node:
            earlier = f" or 0 to {node - 1} (an earlier node)" if node else ""
            raise ValueError(f"parents[{node}] is {parent}, allowed: -1 (a root){earlier}")
        if parent >= 0:
            ancestors[node] |= ancestors[parent]
            position[node] = position[parent] + 1
    return Rows(ids.astype(np.int32), np.full(count, sequence, np.int32), position, ancestors)
