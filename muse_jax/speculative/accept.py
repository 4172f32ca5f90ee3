"""What becomes of verified trees: the paths that the target itself would have taken, and the caches after them."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from muse_jax import _native  # noqa: F401  registers the handlers
from muse_jax.decode import DecodeState, Taps
from muse_jax.decode.state import SPECS
from muse_jax.decode.weights import REPLICATED
from muse_jax.speculative.draft import Seen
from muse_jax.speculative.tree import TokenTree

TARGET = "muse_accept_v1"

_CACHES = ("k_full", "v_full", "k_ring", "v_ring")


@dataclasses.dataclass(frozen=True)
class Accepted:
    """Of B trees of W nodes each. A pytree."""

    path: jax.Array
    """int32 [B, W]: the node at each depth; behind the path's end 0, the root."""
    follows: jax.Array
    """int32 [B, W]: what the target put behind each node of the path, -1 where it could not say."""
    count: jax.Array
    """int32 [B]: new tokens, the first of `follows`: one for each node of the path, or one less if it ended in NaN; 0
    of a sequence that takes no part."""
    token: jax.Array
    """int32 [B]: the last of them, the next root; 0 where nothing follows."""
    nan: jax.Array
    """bool [B]: the target's logits behind the path are NaN."""
    seen: Seen
    """The path as a draft is shown it: tokens and features [B, W, ...], one for each node."""


jax.tree_util.register_dataclass(Accepted, [f.name for f in dataclasses.fields(Accepted)], [])


def accept(
    state: DecodeState,
    tree: TokenTree,
    chosen: jax.Array,
    nan: jax.Array,
    active: jax.Array,
    taps: Taps | None = None,
    tap_layers: tuple[int, ...] = (),
) -> tuple[Accepted, DecodeState]:
    """From each root on, the nodes that are what the target itself put there; their keys and values are committed.

    Lossless for greedy and, with the target's own draws, for sampled tokens, whatever the trees. Node i lies in slot
    length + i, the node at depth r belongs in slot length + r, in sliding layers modulo the ring. Nodes whose slot is
    beyond the capacity are not there. One custom call, and none for roots alone (plain decoding): nothing moves then.

    Args:
        state: after the step that computed the trees; donate it, or XLA copies the caches once.
        tree: B trees.
        chosen: int32 [B W], the target's choice behind each node.
        nan: bool [B W]: the target's logits behind the node are NaN.
        active: bool [B]: the other sequences stay as they are.
        taps: of the step, all layers; needed where `tap_layers` are named.
        tap_layers: whose streams a draft is shown.

    Returns:
        (paths and what follows them, state).
    """
    (batch, width), shape = tree.token.shape, jax.ShapeDtypeStruct
    nodes, of_sequences = shape((batch, width), jnp.int32), shape((batch,), jnp.int32)
    results = [*[nodes] * 3, *[of_sequences] * 4, shape((batch,), jnp.bool_)]
    hidden = state.config.hidden_size
    if width == 1 and not tap_layers:
        return _accept_roots(state, tree, chosen, nan, active)
    if tap_layers:
        assert taps is not None
        results.append(shape((batch, width, len(tap_layers), hidden), jnp.bfloat16))

    def call(*operands: jax.Array):
        caches = [shape(x.shape, x.dtype) for x in operands[6:10]]
        return tuple(
            jax.ffi.ffi_call(TARGET, [*caches, *results], input_output_aliases={6 + i: i for i in range(4)})(
                *operands, capacity=np.int64(state.capacity), tap_layers=np.array(tap_layers, np.int32)
            )
        )

    specs = [SPECS[name] for name in _CACHES]
    residuals = [] if taps is None or not tap_layers else [taps.residuals]
    with jax.named_scope("muse_accept"):
        out = jax.shard_map(
            call,
            mesh=state.mesh,
            in_specs=(*[REPLICATED] * 6, *specs, *[REPLICATED] * len(residuals)),
            out_specs=(*specs, *[REPLICATED] * len(results)),
            check_vma=False,
        )(
            tree.token, tree.parent, chosen, nan, state.lengths, active, *(getattr(state, n) for n in _CACHES),
            *residuals,
        )  # fmt: skip
    path, follows, token, committed, count, following, grown, ended = out[4:12]
    features = out[12] if tap_layers else jnp.zeros((batch, width, 0, hidden), jnp.bfloat16)
    seen = Seen(token, features, committed, state.lengths)
    state = dataclasses.replace(state, lengths=grown, **dict(zip(_CACHES, out[:4], strict=True)))
    return Accepted(path, follows, count, following, ended, seen), state


def _accept_roots(
    state: DecodeState, tree: TokenTree, chosen: jax.Array, nan: jax.Array, active: jax.Array
) -> tuple[Accepted, DecodeState]:
    there = active & (state.lengths < state.capacity)
    ended, count = there & nan, there.astype(jnp.int32)
    following = jnp.where(nan | ~there, -1, chosen)
    features = jnp.zeros((len(active), 1, 0, state.config.hidden_size), jnp.bfloat16)
    seen = Seen(tree.token, features, count, state.lengths)
    accepted = Accepted(
        path=jnp.zeros_like(tree.token), follows=following[:, None], count=count - ended,
        token=jnp.maximum(following, 0), nan=ended, seen=seen,
    )  # fmt: skip
    return accepted, dataclasses.replace(state, lengths=state.lengths + count)
