"""Parity: a decoded text against the reference, or with a draft against without: every tap, byte for byte."""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import jax
import numpy as np

from muse_jax.decode import DecodeWeights, TokenIds, as_prompts
from muse_jax.decoded import decode_text
from muse_jax.guarantee import guarantee
from muse_jax.speculative import Draft

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
    steps: int
    """Decode steps after the prompt: one per generated token, or fewer with a draft."""
    against: str
    """What the decoded side was compared with: the reference, or with a draft plain decoding."""
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
    token_ids: TokenIds,
    *,
    steps: int = 0,
    weights: DecodeWeights | None = None,
    chunk: int = 64,
    draft: Draft | None = None,
) -> ParityReport:
    """Compare the fused decode path with the reference on one sequence, or decoding with a draft with plain decoding.

    Args:
        model: a loaded model.
        token_ids: the prompt; it goes through chunked prefill.
        steps: tokens to decode greedily after it, one per step (with a draft, several per step).
        weights: packed weights of the decoding side (with a draft, of the drafted side), `model.weights` by default
            (tests flip a bit in them).
        chunk: rows per prefill step.
        draft: compare the text that is decoded with it, and every tap of the rows that were accepted, with plain
            decoding of the same prompt.

    Raises:
        ValueError: empty prompt, ids out of range, too many positions, or NaN logits with a draft.
    """
    mine = decode_text(model, token_ids, steps=steps, weights=weights, chunk=chunk, draft=draft)
    layers, text = model.config.num_hidden_layers, []
    if draft is None:
        arrays = model.reference_taps(np.asarray([mine.tokens], np.int32))
        theirs = {name: np.asarray(array)[0] for name, array in arrays.items()}
    else:
        plain = decode_text(model, token_ids, steps=steps, chunk=chunk)
        theirs = plain.taps
        text = [difference("tokens", np.asarray(mine.tokens, np.int32), np.asarray(plain.tokens, np.int32))]
    return ParityReport(
        taps=[*compare(mine.taps, theirs, layers), *text],
        tokens=mine.tokens,
        prompt_length=len(as_prompts(token_ids)[0]),
        steps=mine.steps,
        against="plain decoding" if draft else "the expert-parallel reference",
        guarantee=guarantee(model.mesh),
    )


def compare(
    decoded: Mapping[str, np.ndarray], reference: Mapping[str, np.ndarray], layers: int
) -> Iterator[TapDifference]:
    """Taps of both sides, [T, ...] each, in the order of computation; either side may hold only the last positions."""
    names = [f"layers.{i}.{tap}" for i in range(layers) for tap in LAYER_TAPS] + ["logits"]
    total = len(reference["logits"])
    for name in names:
        last = min(len(decoded[name]), len(reference[name]))
        mine, theirs = (side[name][len(side[name]) - last :] for side in (decoded, reference))
        yield difference(name, mine, theirs, total - last)


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
