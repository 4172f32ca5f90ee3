"""Parity: decode a text step by step, run the reference over the same text, compare every tap byte for byte."""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np

from muse_jax.decode import (
    DecodeState,
    DecodeWeights,
    StepOutput,
    Taps,
    init_state,
    next_rows,
    prefill,
    run_head,
    run_layers,
)
from muse_jax.decode.state import ring_slots
from muse_jax.guarantee import guarantee

if TYPE_CHECKING:
    from muse_jax.language_model import LanguageModel

_FRACTION_BITS = {"bfloat16": 7, "float32": 23, "float8_e4m3fn": 3}

LAYER_TAPS = ("k", "v", "post_attention_residual", "router_experts", "router_weights", "post_feedforward_residual")


@dataclasses.dataclass(frozen=True)
class TapDifference:
    """One tap compared over all positions that both sides hold."""

    tap: str
    """`layers.3.post_attention_residual`, `logits`, ..."""
    bytes: int
    """Bytes compared."""
    differing_bytes: int
    first_position: int | None
    """First sequence position with a difference."""
    max_ulp: int
    """Largest difference in units in the last place (for expert ids: in ids)."""


@dataclasses.dataclass(frozen=True)
class ParityReport:
    """All taps in the order of computation."""

    taps: list[TapDifference]
    tokens: list[int]
    """The text that was compared: prompt and generated ids."""
    prompt_length: int
    guarantee: str
    """`muse_jax.guarantee` of the devices. Both sides ran on these: 0 differing bytes on an architecture that was never
    compared says nothing about the bits of others."""

    @property
    def differing_bytes(self) -> int:
        """Over all taps; 0 is parity."""
        return sum(t.differing_bytes for t in self.taps)

    @property
    def bytes(self) -> int:
        """Bytes compared over all taps."""
        return sum(t.bytes for t in self.taps)

    @property
    def first(self) -> TapDifference | None:
        """The first differing tap in the order of computation, which is where to look."""
        return next((t for t in self.taps if t.differing_bytes), None)


def parity(
    model: "LanguageModel",
    token_ids: Sequence[int],
    *,
    steps: int = 0,
    weights: DecodeWeights | None = None,
    chunk: int = 64,
) -> ParityReport:
    """Compare the fused decode path with the reference on one sequence.

    Args:
        model: a loaded model.
        token_ids: the prompt; it goes through chunked prefill.
        steps: tokens to decode greedily after it, one per step.
        weights: packed weights of the decoding side, `model.weights` by default (tests flip a bit in them).
        chunk: rows per prefill step.

    Raises:
        ValueError: empty prompt, ids out of range, too many positions.
    """
    decoded, tokens = decoded_taps(model, token_ids, steps=steps, weights=weights, chunk=chunk)
    reference = {k: np.asarray(v)[0] for k, v in model.reference_taps(np.asarray([tokens], np.int32)).items()}
    layers = model.config.num_hidden_layers
    return ParityReport(
        taps=list(compare(decoded, reference, layers)),
        tokens=tokens,
        prompt_length=len(token_ids),
        guarantee=guarantee(model.mesh),
    )


def decoded_taps(
    model: "LanguageModel",
    token_ids: Sequence[int],
    *,
    steps: int = 0,
    weights: DecodeWeights | None = None,
    chunk: int = 64,
) -> tuple[dict[str, np.ndarray], list[int]]:
    """Every tap of the fused decode path on one sequence; arguments and errors as `parity`.

    Returns:
        (tap -> array [T, ...]; K and V of sliding layers only for the positions still in the ring, tokens).
    """
    if not len(token_ids) or steps < 0:
        raise ValueError(
            f"parity needs at least one token id and steps >= 0, got {len(token_ids)} ids and steps {steps}"
        )
    total = len(token_ids) + steps
    state = init_state(model.config, model.mesh, capacity=total)
    taps, tokens, state = _decode(weights or model.weights, state, list(token_ids), steps, chunk)
    return taps | dict(_cached(model.config, state, total)), tokens


def compare(
    decoded: Mapping[str, np.ndarray], reference: Mapping[str, np.ndarray], layers: int
) -> Iterator[TapDifference]:
    """Taps of both sides, [T, ...] each, in the order of computation; decoded taps may hold only the last positions."""
    names = [f"layers.{i}.{tap}" for i in range(layers) for tap in LAYER_TAPS] + ["logits"]
    for name in names:
        mine, theirs = decoded[name], reference[name]
        yield difference(name, mine, theirs[len(theirs) - len(mine) :], len(theirs) - len(mine))


def difference(tap: str, a: np.ndarray, b: np.ndarray, first_position: int = 0) -> TapDifference:
    """Compare two arrays [T, ...] of one dtype; position 0 of the arrays is `first_position` of the sequence."""
    if a.shape != b.shape or a.dtype != b.dtype:
        raise ValueError(f"{tap}: cannot compare {a.dtype}{list(a.shape)} with {b.dtype}{list(b.shape)}")
    raw_a = np.ascontiguousarray(a).view(np.uint8).reshape(len(a), -1)
    raw_b = np.ascontiguousarray(b).view(np.uint8).reshape(len(b), -1)
    differs = raw_a != raw_b
    where = np.flatnonzero(differs.any(axis=1))
    return TapDifference(
        tap=tap,
        bytes=raw_a.size,
        differing_bytes=int(differs.sum()),
        first_position=int(where[0]) + first_position if len(where) else None,
        max_ulp=int(np.abs(_ordered(a) - _ordered(b)).max(initial=0)),
    )


def _ordered(x: np.ndarray) -> np.ndarray:
    """Bit patterns as integers that count representable values in order, so that a difference is in ulps."""
    if x.dtype == np.int32:
        return x.astype(np.int64)
    bits = np.ascontiguousarray(x).view({2: np.int16, 4: np.int32}[x.dtype.itemsize]).astype(np.int64)
    return np.where(bits < 0, -(bits & (2 ** (8 * x.dtype.itemsize - 1) - 1)), bits)


def flip_bit(params: Mapping[str, jax.Array], spec: str) -> tuple[dict[str, jax.Array], str]:
    """A copy of the parameters with one bit of one element flipped; proves that the comparison can fail.

    Args:
        params: flat parameters.
        spec: "NAME", "NAME:ELEMENT" or "NAME:ELEMENT:BIT"; element 0 (flat index) and the highest fraction bit of its
            type (of codes: the lowest bit) by default.

    Returns:
        (parameters, what was done in words).

    Raises:
        ValueError: no such parameter, element or bit.
    """
    name, _, rest = spec.partition(":")
    element_text, _, bit_text = rest.partition(":")
    if name not in params:
        raise ValueError(f"--flip-bit: no parameter {name!r}; for example {next(n for n in params if 'o_proj' in n)!r}")
    try:
        default = _FRACTION_BITS.get(str(params[name].dtype), 1) - 1
        element, bit = int(element_text or 0), int(bit_text or default)
    except ValueError:
        raise ValueError(f"--flip-bit: given {spec!r}, expected NAME[:ELEMENT[:BIT]] with whole numbers") from None
    array = np.array(params[name])
    width = 8 * array.dtype.itemsize
    if not 0 <= element < array.size or not 0 <= bit < width:
        raise ValueError(
            f"--flip-bit: {name} has elements 0 to {array.size - 1} and bits 0 to {width - 1}, given {spec!r}"
        )
    raw = array.reshape(-1).view(np.uint8)
    raw[element * array.dtype.itemsize + bit // 8] ^= 1 << bit % 8
    flipped = jax.device_put(array, params[name].sharding)
    return {**params, name: flipped}, f"bit {bit} of element {element} of {name}"


def _decode(
    weights: DecodeWeights, state: DecodeState, prompt: list[int], steps: int, chunk: int
) -> tuple[dict[str, np.ndarray], list[int], DecodeState]:
    """Chunked prefill, then greedy steps; the taps of every position."""
    parts: list[dict[str, np.ndarray]] = []
    logits: list[np.ndarray] = []

    def record(rows: int, taps: Taps, output: StepOutput) -> None:
        parts.append(_layer_taps(taps, rows))
        logits.append(np.asarray(output.logits)[:rows])

    output, state = prefill(weights, state, [prompt], chunk=chunk, on_chunk=record)
    tokens = list(prompt)
    step = jax.jit(_tapped_step, donate_argnames=("state",))
    for _ in range(steps):
        tokens.append(int(output.token[0]))
        output, state, taps = step(weights, state, output.token)
        record(1, taps, output)
    joined = {name: np.concatenate([p[name] for p in parts]) for name in parts[0]}
    return joined | {"logits": np.concatenate(logits)}, tokens, state


def _tapped_step(weights: DecodeWeights, state: DecodeState, token: jax.Array):
    rows = next_rows(state.lengths, token)
    stream, state, taps = run_layers(weights, state, rows, taps=True)
    output = run_head(weights, state, rows, stream)
    return output, dataclasses.replace(state, lengths=state.lengths + jnp.int32(1)), taps


def _layer_taps(taps: Taps, rows: int) -> dict[str, np.ndarray]:
    """By name, the first `rows` rows."""
    residuals, experts, weights = (np.asarray(a) for a in (taps.residuals, taps.experts, taps.weights))
    out = {}
    for i in range(len(residuals)):
        out[f"layers.{i}.post_attention_residual"] = residuals[i, 0, :rows]
        out[f"layers.{i}.post_feedforward_residual"] = residuals[i, 1, :rows]
        out[f"layers.{i}.router_experts"] = experts[i, :rows]
        out[f"layers.{i}.router_weights"] = weights[i, :rows]
    return out


def _cached(config, state: DecodeState, length: int) -> Iterator[tuple[str, np.ndarray]]:
    """K and V of sequence 0 by position, [positions, kv heads, 64]; sliding layers hold the last ring of them."""
    caches = {name: np.asarray(getattr(state, name)) for name in ("k_full", "v_full", "k_ring", "v_ring")}
    index = {"full": 0, "ring": 0}
    ring = ring_slots(config.sliding_window)
    for layer, kind_name in enumerate(config.layer_types):
        kind = "full" if kind_name == "full_attention" else "ring"
        positions = np.arange(0 if kind == "full" else max(0, length - ring), length)
        slots = positions if kind == "full" else positions % ring
        for name in ("k", "v"):
            own = caches[f"{name}_{kind}"][:, index[kind], 0][:, :, slots]  # [8, kv/8, positions, 64]
            yield f"layers.{layer}.{name}", own.reshape(-1, *own.shape[2:]).swapaxes(0, 1)
        index[kind] += 1
