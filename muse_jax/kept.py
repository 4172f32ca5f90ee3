"""What loops of decode steps share: how a token is chosen, and what is kept of it."""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from muse_jax.decode import DecodeWeights, StepOutput
from muse_jax.sampling import Choice, choose, log_probs

VALUES = ("log_probs", "top_tokens", "top_log_probs")
"""Fields of `Kept`, in the order in which `pick` returns their values."""


@dataclasses.dataclass(frozen=True)
class Kept:
    """What a loop of steps has gathered of B sequences."""

    active: jax.Array
    """bool [B]: who goes on."""
    tokens: jax.Array
    """int32 [B, max_new_tokens]; -1 where there is none."""
    reason: jax.Array
    """int32 [B], into FINISH_REASONS of `muse_jax.generate`."""
    count: jax.Array
    """int32 [B]."""
    log_probs: jax.Array | None
    """fp32 [B, max_new_tokens]."""
    top_tokens: jax.Array | None
    """int32 [B, max_new_tokens, top]."""
    top_log_probs: jax.Array | None
    """fp32 [B, max_new_tokens, top]."""


jax.tree_util.register_dataclass(Kept, [f.name for f in dataclasses.fields(Kept)], [])


def no_tokens(batch: int, max_new_tokens: int, logprobs: int | None) -> Kept:
    """Before the first token; `logprobs` as in `muse_jax.generate`."""
    zeros, space = jnp.zeros(batch, jnp.int32), (batch, max_new_tokens)
    return Kept(
        active=jnp.ones(batch, bool),
        tokens=jnp.full(space, -1, jnp.int32),
        reason=zeros,
        count=zeros,
        log_probs=None if logprobs is None else jnp.zeros(space, jnp.float32),
        top_tokens=None if logprobs is None else jnp.zeros((*space, logprobs), jnp.int32),
        top_log_probs=None if logprobs is None else jnp.zeros((*space, logprobs), jnp.float32),
    )


def pick(
    weights: DecodeWeights, output: StepOutput, position: jax.Array, choice: Choice | None, logprobs: int | None
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    """The token that follows each of T rows.

    Args:
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
            token = choose(logits, choice, position)
        return token, () if logprobs is None else log_probs(logits, token, logprobs)

    # Every device has whole rows and does the same. They travel as integers (docs/numerics.md 9).
    with jax.named_scope("muse_sampling"):
        return jax.shard_map(
            call, mesh=weights.mesh, in_specs=PartitionSpec(), out_specs=PartitionSpec(), check_vma=False
        )(lax.bitcast_convert_type(output.logits, jnp.uint32), output.token, position, choice)
