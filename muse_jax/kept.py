"""What a loop of decode steps gathers of its sequences, and who goes on."""

import dataclasses

import jax
import jax.numpy as jnp

VALUES = ("log_probs", "top_tokens", "top_log_probs")
"""Fields of `Kept`, in the order of `muse_jax.sampling.log_probs`."""

LENGTH, STOP, NAN, STOP_STRING = range(4)
FINISH_REASONS = ("length", "stop", "nan", "stop_string")
"""Names of the reasons. The loop knows all but the last, for which text is needed."""


@dataclasses.dataclass(frozen=True)
class Kept:
    """What a loop of steps has gathered of B sequences. A pytree."""

    active: jax.Array
    """bool [B]: who goes on."""
    token: jax.Array
    """int32 [B]: the newest tokens, whose K and V are not cached yet."""
    tokens: jax.Array
    """int32 [B, N], N at least max_new_tokens; -1 where there is none."""
    reason: jax.Array
    """int32 [B], into FINISH_REASONS."""
    count: jax.Array
    """int32 [B]."""
    max_new_tokens: jax.Array
    """int32 [], of each sequence."""
    steps: jax.Array
    """int32 []: steps after the prefill."""
    accepted: jax.Array | None
    """int32 [B, N]: tokens that each step brought, before a stop id or the budget cut them; -1 where
    there was no step. None without a draft."""
    log_probs: jax.Array | None
    """fp32 [B, N]."""
    top_tokens: jax.Array | None
    """int32 [B, N, top]."""
    top_log_probs: jax.Array | None
    """fp32 [B, N, top]."""

    @property
    def logprobs(self) -> int | None:
        """As in `muse_jax.generate`."""
        return None if self.top_tokens is None else self.top_tokens.shape[2]


jax.tree_util.register_dataclass(Kept, [f.name for f in dataclasses.fields(Kept)], [])


def no_tokens(batch: int, max_new_tokens: jax.Array, space: int, logprobs: int | None, drafted: bool) -> Kept:
    """Before the first token; arguments as of `muse_jax.loop.begin`."""
    zeros, shape = jnp.zeros(batch, jnp.int32), (batch, space)
    return Kept(
        active=jnp.ones(batch, bool),
        token=zeros,
        tokens=jnp.full(shape, -1, jnp.int32),
        reason=zeros,
        count=zeros,
        max_new_tokens=max_new_tokens,
        steps=jnp.int32(0),
        accepted=jnp.full(shape, -1, jnp.int32) if drafted else None,
        log_probs=None if logprobs is None else jnp.zeros(shape, jnp.float32),
        top_tokens=None if logprobs is None else jnp.zeros((*shape, logprobs), jnp.int32),
        top_log_probs=None if logprobs is None else jnp.zeros((*shape, logprobs), jnp.float32),
    )


def keep(
    kept: Kept,
    stops: jax.Array,
    token: jax.Array,
    tokens: jax.Array,
    count: jax.Array,
    nan: jax.Array,
    values: tuple[jax.Array, ...],
) -> Kept:
    """Records new tokens and decides who goes on.

    Args:
        kept: so far; of an inactive sequence nothing is recorded.
        stops: int32 [S], ids that end a sequence.
        token: int32 [B], what the next step starts from.
        tokens: int32 [B, W].
        count: int32 [B], how many of the W there are.
        nan: bool [B]: what would come next is not a number.
        values: by VALUES, [B, W, ...] each, or nothing.
    """
    batch, space = kept.tokens.shape
    place = jnp.arange(tokens.shape[1], dtype=jnp.int32)
    room = kept.max_new_tokens - kept.count
    n = jnp.minimum(count, room)
    stop = jnp.any(tokens[:, :, None] == stops, axis=2) & (place < n[:, None])
    stopped = jnp.any(stop, axis=1)
    n = jnp.where(kept.active, jnp.where(stopped, jnp.argmax(stop, axis=1) + 1, n), 0).astype(jnp.int32)
    ended = nan & ~stopped & (count < room)
    at = jnp.where(place < n[:, None], kept.count[:, None] + place, space)
    of = jnp.arange(batch)[:, None]
    gathered = {
        name: getattr(kept, name).at[of, at].set(value, mode="drop")
        for name, value in zip(VALUES, values, strict=False)
    }
    return dataclasses.replace(
        kept,
        active=kept.active & ~stopped & ~ended & (n < room),
        token=token,
        tokens=kept.tokens.at[of, at].set(tokens, mode="drop"),
        reason=jnp.where(kept.active & ended, NAN, jnp.where(kept.active & stopped, STOP, kept.reason)),
        count=kept.count + n,
        **gathered,
    )
