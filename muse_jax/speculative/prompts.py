"""Prefill of the target and, chunk by chunk, of its draft."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from muse_jax.decode import MAX_ROWS, DecodeState, DecodeWeights, StepOutput, Taps, prefill
from muse_jax.mesh import replicated
from muse_jax.speculative.draft import Draft, Seen

_observe = jax.jit(lambda draft, carry, seen: draft.observe(carry, seen), donate_argnums=1)


def prefill_both(
    weights: DecodeWeights,
    state: DecodeState,
    prompts: list[list[int]],
    draft: Draft,
    *,
    chunk: int = MAX_ROWS,
    on_chunk: Callable[[int, Taps, Callable[[], StepOutput]], None] | None = None,
) -> tuple[StepOutput, DecodeState, tuple[Any, Seen]]:
    """Prompts into an empty state.

    Args:
        weights: as in `muse_jax.decode.prefill`.
        state: as in `prefill`.
        prompts: as in `prefill`.
        draft: starts, and sees all prompts.
        chunk: as in `prefill`.
        on_chunk: as in `prefill`.

    Returns:
        (output after each prompt's last token, state, (the draft's carry, no tokens that it has yet to see)).
    """
    batch = state.batch
    carry = draft.start(batch=batch, capacity=state.capacity)
    # The order of prefill's rows.
    sequence = np.repeat(np.arange(batch), [len(p) for p in prompts])
    position = np.concatenate([np.arange(len(p)) for p in prompts])
    token = np.concatenate([np.asarray(p, np.int32) for p in prompts])
    size = min(chunk, len(token))
    done = 0

    def observe(count: int, taps: Taps, outputs: Callable[[], StepOutput]) -> None:
        nonlocal carry, done
        part = slice(done, done + count)
        done += count
        row = np.zeros((batch, size), np.int32)  # of the chunk, by sequence
        counts, lengths = np.zeros(batch, np.int32), np.zeros(batch, np.int32)
        for b in range(batch):
            own = np.flatnonzero(sequence[part] == b)
            row[b, : len(own)], counts[b] = own, len(own)
            lengths[b] = position[part][own[0]] if len(own) else 0
        seen = Seen(
            jnp.asarray(token[part][row]),
            _features(draft, weights, taps, size)[row],
            jnp.asarray(counts),
            jnp.asarray(lengths),
        )
        carry = _observe(draft, carry, seen)
        if on_chunk is not None:
            on_chunk(count, taps, outputs)

    output, state = prefill(weights, state, prompts, chunk=size, on_chunk=observe)
    seen = jax.device_put(Seen.none(draft, batch, weights.config.hidden_size), replicated(weights.mesh))
    return output, state, (carry, seen)


def _features(draft: Draft, weights: DecodeWeights, taps: Taps | None, rows: int) -> jax.Array:
    """bf16 [T, E, H]: the stream after the MoE of the layers that the draft sees; E = 0 if it sees none."""
    if taps is None or not draft.tap_layers:
        return jnp.zeros((rows, 0, weights.config.hidden_size), jnp.bfloat16)
    return taps.residuals[jnp.asarray(draft.tap_layers), 1].astype(jnp.bfloat16).transpose(1, 0, 2)
