"""Token trees: what a draft proposes and a step of the target verifies (best first as in DDTree, arXiv 2604.12989)."""

import dataclasses

import jax
import jax.numpy as jnp

from muse_jax.decode import MAX_ROWS, Rows


@dataclasses.dataclass(frozen=True)
class TokenTree:
    """A tree of W nodes for each of B sequences. A pytree.

    Node 0 is the newest token of the sequence, whose K and V no cache holds yet; a node comes after its parent. Of
    siblings with the same token only the first is ever followed.
    """

    token: jax.Array
    """int32 [B, W]."""
    parent: jax.Array
    """int32 [B, W]; -1 for node 0."""
    depth: jax.Array
    """int32 [B, W]; 0 for node 0."""
    ancestors: jax.Array
    """bool [B, W, W]: node u is node t or above it."""

    @property
    def width(self) -> int:
        """W."""
        return self.token.shape[1]

    def rows(self, lengths: jax.Array, active: jax.Array) -> Rows:
        """The step that verifies the trees: row b W + i is node i of sequence b.

        Args:
            lengths: int32 [B], committed tokens of each sequence, node 0's position.
            active: bool [B, W]; the others cost nothing. An active node's parent must be active, and a node that is not
                active may only have such behind it.
        """
        batch, width = self.token.shape
        same = jnp.eye(batch, dtype=bool)[:, None, :, None]
        return Rows(
            token=self.token.reshape(-1),
            sequence=jnp.where(active, jnp.arange(batch, dtype=jnp.int32)[:, None], -1).reshape(-1),
            position=(lengths[:, None] + self.depth).reshape(-1),
            ancestors=(self.ancestors[:, :, None, :] & same).reshape(batch * width, batch * width),
        )


jax.tree_util.register_dataclass(TokenTree, ["token", "parent", "depth", "ancestors"], [])


def make_tree(token: jax.Array, parent: jax.Array) -> TokenTree:
    """A tree from its tokens and parents, int32 [B, W] each."""
    width = token.shape[1]
    node = jnp.arange(width, dtype=jnp.int32)
    ancestors = (node[:, None] == node) | (parent[:, :, None] == node)
    for _ in range(max(width - 1, 1).bit_length()):  # lines twice as long each time
        ancestors = jnp.any(ancestors[:, :, :, None] & ancestors[:, None, :, :], axis=2)
    return TokenTree(token, parent, ancestors.sum(axis=2, dtype=jnp.int32) - 1, ancestors)


def chain(token: jax.Array) -> TokenTree:
    """A tree without branches: int32 [B, W] tokens, each the child of the one before."""
    return make_tree(token, jnp.broadcast_to(jnp.arange(token.shape[1], dtype=jnp.int32) - 1, token.shape))


def best_first(
    token: jax.Array, candidates: jax.Array, log_probs: jax.Array, *, width: int
) -> tuple[TokenTree, jax.Array]:
    """The tree of the `width` - 1 most probable continuations.

    A node's score is its parent's plus its own log-probability. Nodes are numbered in the order of score (largest
    first), depth, parent and place among the parent's children (by log-probability, then token id), so that the tree is
    a function of the log-probabilities' bits alone, and a narrower tree is the beginning of a wider one.

    Args:
        token: int32 [B], the newest token of each sequence.
        candidates: int32 [B, G, K], different tokens that may come G = 1, 2, ... places later.
        log_probs: fp32 [B, G, P, K]: P = 1, or P = K for probabilities that depend on which candidate of the place
            before was taken (of place 0, row 0 counts). NaN counts as -inf, and what is positive as 0.
        width: W, nodes with the root: 1 to 64, and no more than there are continuations.

    Returns:
        (the trees, scores fp32 [B, W]).

    Raises:
        ValueError: shapes that do not fit, or a width out of range.
    """
    batch, places, count = candidates.shape
    rows = log_probs.shape[2] if log_probs.ndim == 4 else 0
    if rows not in (1, count) or log_probs.shape != (batch, places, rows, count) or token.shape != (batch,):
        raise ValueError(
            f"token {list(token.shape)}, candidates {list(candidates.shape)}, log_probs {list(log_probs.shape)}; "
            "expected [B], [B, G, K], [B, G, 1 or K, K]"
        )
    most = 1
    for _ in range(places):
        most = min(1 + count * most, MAX_ROWS)
    if not 1 <= width <= most:
        raise ValueError(f"width is {width}, allowed: 1 to {most} ({places} places of {count} candidates)")
    one = jax.vmap(lambda t, c, s: _best_first(t, c, s, width))
    tokens, parents, scores = one(token, candidates, log_probs)
    return make_tree(tokens, parents), scores


def _best_first(token: jax.Array, candidates: jax.Array, log_probs: jax.Array, width: int):
    """One sequence: (tokens, parents, scores) [W]."""
    places, rows, count = log_probs.shape
    edge = jnp.minimum(jnp.where(jnp.isnan(log_probs), -jnp.inf, log_probs), 0.0)
    ids = jnp.broadcast_to(candidates[:, None, :], edge.shape)
    which = jnp.broadcast_to(jnp.arange(count, dtype=jnp.int32), edge.shape)
    # Each row's children in order: log-probability descending, then id.
    falling, _, ranked = jax.lax.sort((-edge, ids, which), num_keys=2)
    ranked_edge = -falling

    nodes = jnp.zeros(width, jnp.int32)
    # Tokens, parents, depths, the candidate that a node is of its place, scores.
    tree = nodes.at[0].set(token), nodes.at[0].set(-1), nodes, nodes, jnp.zeros(width, jnp.float32)
    # What may come next: the first child of each node, whose place its next sibling takes when it has come. Score,
    # depth, parent, rank among the parent's children, and whether it exists.
    entries = jnp.full(width, -jnp.inf), nodes, nodes, nodes, jnp.zeros(width, bool)

    def row_of(tree, parent):
        level = tree[2][parent]
        return level, jnp.where((level == 0) | (rows == 1), 0, tree[3][parent])

    def offer(tree, entries, at, parent, rank):
        level, row = row_of(tree, parent)
        edge = ranked_edge[jnp.minimum(level, places - 1), row, jnp.minimum(rank, count - 1)]
        entry = tree[4][parent] + edge, level + 1, parent, rank, (level < places) & (rank < count)
        return tuple(array.at[at].set(value) for array, value in zip(entries, entry, strict=True))

    def add(node, carry):
        tree, entries = carry
        score, depth, above, place, best = entries
        for key in (-score, depth, above, place):  # the smallest of each in turn
            least = jnp.min(jnp.where(best, key, jnp.inf if key.dtype == jnp.float32 else MAX_ROWS * count))
            best = best & (key == least)
        at = jnp.argmax(best)
        parent, rank = above[at], place[at]
        level, row = row_of(tree, parent)
        candidate = ranked[level, row, rank]
        new = candidates[level, candidate], parent, depth[at], candidate, score[at]
        tree = tuple(array.at[node].set(value) for array, value in zip(tree, new, strict=True))
        entries = offer(tree, entries, at, parent, rank + 1)
        return tree, offer(tree, entries, node, node, 0)

    (tokens, parents, _, _, scores), _ = jax.lax.fori_loop(1, width, add, (tree, offer(tree, entries, 0, 0, 0)))
    return tokens, parents, scores
