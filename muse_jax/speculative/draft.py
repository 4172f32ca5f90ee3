"""What a draft is to the loop: any pytree with these methods. The target's output does not depend on it."""

import dataclasses
from typing import Any, Protocol

import jax
import jax.numpy as jnp

from muse_jax.speculative.tree import TokenTree, chain


@dataclasses.dataclass(frozen=True)
class Seen:
    """Tokens that were committed, up to T for each of B sequences, as a draft is shown them. A pytree."""

    token: jax.Array
    """int32 [B, T]."""
    features: jax.Array
    """bf16 [B, T, E, H], the target's residual stream after the E layers that the draft sees, rounded."""
    count: jax.Array
    """int32 [B], how many of the T are there; the others mean nothing."""
    lengths: jax.Array
    """int32 [B], the position of the first."""

    @classmethod
    def none(cls, draft: "Draft", batch: int, hidden_size: int) -> "Seen":
        """No tokens, in the shape of what a step commits."""
        shape = (batch, draft.width, len(draft.tap_layers), hidden_size)
        return cls(jnp.zeros(shape[:2], jnp.int32), jnp.zeros(shape, jnp.bfloat16), *jnp.zeros((2, batch), jnp.int32))


jax.tree_util.register_dataclass(Seen, [f.name for f in dataclasses.fields(Seen)], [])


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

    def observe(self, carry: Any, seen: Seen) -> Any:
        """The carry after tokens of the prompts, of which it is shown one chunk after the other."""
        ...

    def propose(self, carry: Any, seen: Seen, token: jax.Array, lengths: jax.Array) -> tuple[TokenTree, Any]:
        """Trees of W nodes below the newest tokens.

        Args:
            carry: state, which has seen everything before the last step.
            seen: what the last step committed (T = W), everything else before `lengths`. With it comes one call less
                than if it were shown before.
            token: int32 [B], the newest tokens, nodes 0.
            lengths: int32 [B], their positions.

        Returns:
            (the trees, the carry, which has seen what was shown).
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

    def observe(self, carry: Any, seen: Seen) -> Any:
        """Nothing to learn."""
        del seen
        return carry

    def propose(self, carry: Any, seen: Seen, token: jax.Array, lengths: jax.Array) -> tuple[TokenTree, Any]:
        """The newest tokens, int32 [B], and nothing behind them."""
        del seen, lengths
        return chain(token[:, None]), carry


jax.tree_util.register_dataclass(NoDraft, [], [])
