"""What a draft is to the loop: any pytree with these methods. The target's output does not depend on it."""

import dataclasses
from typing import Any, Protocol

import jax

from muse_jax.speculative.tree import TokenTree, chain


class Draft(Protocol):
    """Proposes trees of tokens. A pytree, whose leaves are its weights; its state is the `carry`, a pytree too.

    All methods are traced inside the target's loop, so they must not wait for the host.
    """

    @property
    def width(self) -> int:
        """Nodes of each tree, W: the rows that a step of the target has for each sequence, 1 to 64 / B."""
        ...

    @property
    def tap_layers(self) -> tuple[int, ...]:
        """The target's layers, E of them, after which it sees the residual stream; () if it needs none."""
        ...

    def start(self, *, batch: int, capacity: int) -> Any:
        """The carry of B sequences of up to `capacity` positions, nothing seen yet."""
        ...

    def observe(self, carry: Any, token: jax.Array, features: jax.Array, count: jax.Array, lengths: jax.Array) -> Any:
        """Tokens that were committed.

        Args:
            carry: before.
            token: int32 [B, T].
            features: bf16 [B, T, E, H], the target's residual stream after the tapped layers, rounded.
            count: int32 [B], how many of the T are there.
            lengths: int32 [B], the position of the first.
        """
        ...

    def propose(self, carry: Any, token: jax.Array, lengths: jax.Array) -> tuple[TokenTree, Any]:
        """Trees of W nodes below the newest tokens.

        Args:
            carry: state, after `observe` of everything before `lengths`.
            token: int32 [B], the newest tokens, nodes 0.
            lengths: int32 [B], their positions.
        """
        ...


@dataclasses.dataclass(frozen=True)
class NoDraft:
    """Plain decoding: every tree is its root. Satisfies the protocol `Draft`; its carry is ()."""

    width = 1
    tap_layers = ()

    def start(self, *, batch: int, capacity: int) -> tuple[()]:
        """Nothing to remember."""
        del batch, capacity
        return ()

    def observe(self, carry: Any, token: jax.Array, features: jax.Array, count: jax.Array, lengths: jax.Array) -> Any:
        """Nothing to learn."""
        del token, features, count, lengths
        return carry

    def propose(self, carry: Any, token: jax.Array, lengths: jax.Array) -> tuple[TokenTree, Any]:
        """The newest tokens, int32 [B], and nothing behind them."""
        del lengths
        return chain(token[:, None]), carry


jax.tree_util.register_dataclass(NoDraft, [], [])
