"""Prefill: prompts into the caches, in chunks through the decode call itself or whole through the reference."""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer
from jax.sharding import NamedSharding, PartitionSpec

from muse_jax.config import MuseSparkConfig
from muse_jax.decode.rows import MAX_ROWS, chain_rows
from muse_jax.decode.state import DecodeState
from muse_jax.decode.step import StepOutput, Taps, check_state, run_head, run_layers
from muse_jax.decode.weights import DecodeWeights
from muse_jax.mesh import AXIS, RANKS, in_own_mesh
from muse_jax.profiling import host_phase

TokenIds = Sequence[int] | np.ndarray | jax.Array
"""Of one text: whole numbers, in an array [T]."""
Prompts = TokenIds | Sequence[TokenIds]
"""Of one text or of several, each of its own length; an array [B, T] if they have one length."""


def as_prompts(prompts: Any) -> list[list[int]]:
    """One prompt (token ids) or several -> a list of prompts; lists, NumPy and JAX arrays all do.

    Raises:
        TypeError: neither, or ids that are not whole numbers or only known while a program runs.
    """
    refuse_tracing(prompts)
    try:
        rows = [np.asarray(prompts)] if np.ndim(prompts[0]) == 0 else [np.asarray(p) for p in prompts]
    except (TypeError, LookupError, ValueError):
        rows = [np.asarray(p) for p in prompts] if isinstance(prompts, list | tuple) else [np.asarray(prompts)]
    for row in rows:
        if row.ndim != 1 or (row.size and not np.issubdtype(row.dtype, np.integer)):
            raise TypeError(
                f"prompts: given {prompts!r:.80}, expected token ids (whole numbers) of one prompt or of several"
            )
    return [[int(token) for token in row] for row in rows]


def refuse_tracing(values: Any) -> None:
    """Raise TypeError if a value is only known inside a program."""
    if any(isinstance(value, Tracer) for value in jax.tree.leaves(values)):
        raise TypeError(
            "prefill, generate and stream read values on the host and cannot be called inside jit, scan or vmap; call "
            "them outside, and muse_jax.decode.decode_step (or run_step) inside"
        )


@in_own_mesh
@host_phase("muse_prefill")
def prefill(
    weights: DecodeWeights,
    state: DecodeState,
    prompts: Sequence[Sequence[int]],
    *,
    chunk: int = MAX_ROWS,
    on_chunk: Callable[[int, Taps, Callable[[], StepOutput]], None] | None = None,
) -> tuple[StepOutput, DecodeState]:
    """Append prompts to the sequences of a state.

    The rows of all prompts are packed into steps of `chunk` rows; the bits do not depend on the chunk.

    Args:
        weights: packed weights.
        state: caches; consumed (its buffers are donated). A prompt continues its sequence at the committed length.
        prompts: one list of token ids per sequence; an empty one leaves its sequence alone.
        chunk: rows per step, 1 to 64.
        on_chunk: called after each chunk with the number of its rows, their taps, and a function that works out the
            output of all rows, to be called there and then; the prefill itself only needs the prompts' last rows.

    Returns:
        (output after each prompt's last token, one row per sequence, state). Sequences with an empty prompt have zero
        logits and token -1.

    Raises:
        ValueError: wrong number of prompts, ids out of range, capacity exceeded, chunk out of range.
    """
    check_state(weights, state)
    refuse_tracing((weights, state))
    _check(weights.config, state, prompts, chunk)
    lengths = np.asarray(state.lengths)
    rows = [(t, b, lengths[b] + i) for b, prompt in enumerate(prompts) for i, t in enumerate(prompt)]
    last = {b: lengths[b] + len(prompt) - 1 for b, prompt in enumerate(prompts) if len(prompt)}
    output = _no_output(weights, state)
    size = min(chunk, max(1, len(rows)))
    for begin in range(0, len(rows), size):
        part = rows[begin : begin + size]
        tokens, sequences, positions = (list(column) for column in zip(*part, strict=True))
        step_rows = chain_rows(tokens, sequences, positions, size)
        stream, state, taps = _layers(weights, state, step_rows, on_chunk is not None)
        if on_chunk is not None and taps is not None:
            on_chunk(len(part), taps, functools.partial(_head, weights, state, step_rows, stream))
        done = [(row, b) for row, (_, b, position) in enumerate(part) if position == last[b]]
        if done:
            row, sequence = (np.array(column) for column in zip(*done, strict=True))
            active = np.full(size, -1, np.int32)
            active[row] = sequence
            last_rows = dataclasses.replace(step_rows, sequence=active)
            output = _place(output, _head(weights, state, last_rows, stream), row, sequence)
        jax.block_until_ready(state.epoch)  # on the CPU, jaxlib before 0.12 hangs with many in flight
    weights.communicator.check()
    return output, state


@functools.partial(jax.jit, static_argnames=("taps",), donate_argnames=("state",))
def _layers(weights: DecodeWeights, state: DecodeState, rows, taps: bool):
    with jax.named_scope("muse_prefill"):
        stream, state, values = run_layers(weights, state, rows, taps=taps)
    counts = (
        jnp.zeros_like(state.lengths)
        .at[rows.sequence]
        .add((rows.sequence >= 0).astype(jnp.int32), mode="drop", wrap_negative_indices=False)
    )
    return stream, dataclasses.replace(state, lengths=state.lengths + counts), values


_head = jax.jit(run_head)


@jax.jit
def _no_output(weights: DecodeWeights, state: DecodeState) -> StepOutput:
    """The output of sequences that have no new token: zeros, token -1."""
    batch = state.batch
    vocab = NamedSharding(weights.mesh, PartitionSpec(None, AXIS))
    logits = lax.with_sharding_constraint(jnp.zeros((batch, weights.config.vocab_size), jnp.float32), vocab)
    return StepOutput(logits, jnp.full(batch, -1, jnp.int32), jnp.zeros(batch, bool))


@jax.jit
def _place(output: StepOutput, rows: StepOutput, row: np.ndarray, sequence: np.ndarray) -> StepOutput:
    """Row `row[i]` of a step becomes the output of sequence `sequence[i]`."""
    return jax.tree.map(lambda all_, new: all_.at[sequence].set(new[row]), output, rows)


@host_phase("muse_prefill_whole")
def prefill_whole(
    config: MuseSparkConfig,
    state: DecodeState,
    prompts: Sequence[Sequence[int]],
    taps: Callable[[np.ndarray], Mapping[str, jax.Array]],
) -> tuple[StepOutput, DecodeState]:
    """Fill an empty state from the reference's whole-sequence taps; the same bits as `prefill`.

    Args:
        config: the model.
        state: empty caches.
        prompts: one non-empty list of token ids per sequence.
        taps: tokens int32 [B, T] -> the reference's taps.

    Returns:
        As `prefill`.
    """
    refuse_tracing(state)
    _check(config, state, prompts)
    if np.asarray(state.lengths).any() or not all(map(len, prompts)):
        raise ValueError("prefill_whole needs an empty state and a non-empty prompt for every sequence; use prefill")
    lengths = np.array([len(p) for p in prompts], np.int32)
    tokens = np.zeros((state.batch, lengths.max()), np.int32)
    for row, prompt in zip(tokens, prompts, strict=True):
        row[: len(prompt)] = prompt
    values = taps(tokens)
    kinds = [t == "full_attention" for t in config.layer_types]
    ring = state.k_ring.shape[-2]
    caches = {}
    for name in ("k", "v"):
        layers = [values[f"layers.{i}.{name}"] for i in range(config.num_hidden_layers)]
        for kind, full in (("full", True), ("ring", False)):
            cache = getattr(state, f"{name}_{kind}")
            own = [_by_rank(layer) for layer, is_full in zip(layers, kinds, strict=True) if is_full == full]
            if own:
                slots = _positions_of_slots(lengths, cache.shape[-2], None if full else ring)
                cache = _fill(cache, jnp.stack(own, axis=1), slots)
            caches[f"{name}_{kind}"] = cache
    logits = values["logits"][jnp.arange(state.batch), lengths - 1]
    rows = np.asarray(logits)
    output = StepOutput(logits, jnp.array([_argmax(row) for row in rows], jnp.int32), jnp.isnan(logits).any(axis=-1))
    filled = jax.device_put(jnp.asarray(lengths), state.lengths.sharding)
    return output, dataclasses.replace(state, lengths=filled, **caches)


def _by_rank(layer: jax.Array) -> jax.Array:
    """bf16 [B, T, kv, 64] -> uint16 [8, B, kv/8, T, 64]: XLA:CPU reshards bf16 through fp32, which changes NaNs."""
    batch, length, heads, width = layer.shape
    return (
        lax.bitcast_convert_type(layer, jnp.uint16)
        .reshape(batch, length, RANKS, heads // RANKS, width)
        .transpose(2, 0, 3, 1, 4)
    )


def _positions_of_slots(lengths: np.ndarray, slots: int, ring: int | None) -> np.ndarray:
    """int32 [B, slots]: the newest position that lies in each slot, -1 for an empty one."""
    slot = np.arange(slots)[None, :]
    last = lengths[:, None] - 1
    position = slot if ring is None else last - (last - slot) % ring
    return np.where((position >= 0) & (position <= last), position, -1).astype(np.int32)


@functools.partial(jax.jit, donate_argnames=("cache",))
def _fill(cache: jax.Array, values: jax.Array, positions: jax.Array) -> jax.Array:
    """cache bf16 [8, L, B, h, slots, 64] from bits [8, L, B, h, T, 64] at positions [B, slots]; pure data movement."""
    at = jnp.maximum(positions, 0)[None, None, :, None, :, None]
    picked = jnp.take_along_axis(values, at, axis=4)
    filled = jnp.where((positions >= 0)[None, None, :, None, :, None], picked, jnp.zeros((), picked.dtype))
    return lax.bitcast_convert_type(filled, cache.dtype)


def _argmax(row: np.ndarray) -> int:
    """The contract's argmax: NaN below all numbers, ties to the lowest id."""
    return int(np.argmax(np.where(np.isnan(row), -np.inf, row)))


def _check(
    config: MuseSparkConfig, state: DecodeState, prompts: Sequence[Sequence[int]], chunk: int = MAX_ROWS
) -> None:
    if not isinstance(chunk, int | np.integer) or not 1 <= chunk <= MAX_ROWS:
        raise ValueError(f"chunk is {chunk}, allowed: 1 to {MAX_ROWS}")
    if len(prompts) != state.batch:
        raise ValueError(f"got {len(prompts)} prompts for a state of {state.batch} sequences; give one per sequence")
    lengths, vocab = np.asarray(state.lengths), config.vocab_size
    for b, prompt in enumerate(prompts):
        for i, token in enumerate(prompt):
            if not 0 <= token < vocab:
                raise ValueError(f"prompts[{b}][{i}] is {token}, allowed: 0 to {vocab - 1} (vocab_size {vocab})")
        if lengths[b] + len(prompt) > state.capacity:
            raise ValueError(
                f"prompt {b} needs {lengths[b] + len(prompt)} positions, the state holds {state.capacity}; "
                "make it with init_state(capacity=...)"
            )
