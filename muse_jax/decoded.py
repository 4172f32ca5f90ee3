"""Every intermediate array of one text that the fused path decodes, plain or with a draft, by position."""

import dataclasses
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from muse_jax.decode import (
    DecodeState,
    DecodeWeights,
    StepOutput,
    Taps,
    TokenIds,
    as_prompts,
    init_state,
    next_rows,
    prefill,
    run_step,
)
from muse_jax.decode.state import ring_slots
from muse_jax.sampling import is_whole
from muse_jax.speculative import Draft, prefill_both, speculative_step

if TYPE_CHECKING:
    from muse_jax.language_model import LanguageModel


def check_model(model: Any) -> None:
    """Raise TypeError unless it is a model: by what it has, because the class's module stands above."""
    if not all(hasattr(model, name) for name in ("weights", "config", "mesh")):
        raise TypeError(f"model: given {model!r:.80}, expected a LanguageModel, such as muse_jax.load(folder) returns")


def check_draft(draft: Any) -> None:
    """Raise TypeError unless it is a draft, or None."""
    if draft is not None and not all(hasattr(draft, name) for name in ("width", "start", "observe", "propose")):
        raise TypeError(f"draft: given {draft!r:.80}, expected None or what load_draft(folder, model) returns")


@dataclasses.dataclass(frozen=True)
class Decoded:
    """A prompt and what was decoded greedily behind it, T positions together."""

    tokens: list[int]
    """T ids."""
    taps: dict[str, np.ndarray]
    """Tap -> array [T, ...]; K and V of sliding layers only for the last positions, as far as the rings hold them."""
    steps: int
    """Decode steps after the prefill."""


def decode_text(
    model: "LanguageModel",
    token_ids: TokenIds,
    *,
    steps: int = 0,
    weights: DecodeWeights | None = None,
    chunk: int = 64,
    draft: Draft | None = None,
) -> Decoded:
    """Decode a text and keep every tap.

    Args:
        model: a loaded model.
        token_ids: the prompt; it goes through chunked prefill.
        steps: tokens to decode greedily after it, one per step; with a draft, several per step.
        weights: packed weights, `model.weights` by default.
        chunk: rows per prefill step.
        draft: proposes trees; the taps are those of the rows that were accepted.

    Raises:
        ValueError: empty prompt, ids out of range, too many positions, or logits that are NaN with a draft, because
            nothing is accepted behind them.
    """
    check_model(model)
    check_draft(draft)
    prompts, limit = as_prompts(token_ids), model.config.max_position_embeddings
    if len(prompts) != 1 or not prompts[0]:
        raise ValueError(f"token_ids: given {token_ids!r:.80}, expected one text of at least one token id")
    token_ids = prompts[0]
    if (room := limit - len(token_ids)) < 0:
        raise ValueError(f"token_ids: given {len(token_ids)}, allowed: at most {limit} (max_position_embeddings)")
    if not is_whole(steps) or not 0 <= steps <= room:
        raise ValueError(
            f"steps is {steps!r}, allowed: 0 to {room} behind {len(token_ids)} tokens (max_position_embeddings {limit})"
        )
    total = len(token_ids) + steps
    weights, rows = weights or model.weights, _Rows()
    if draft is None:
        state = init_state(model.config, model.mesh, capacity=total)
        tokens, state, count = _plain(weights, state, token_ids, steps, chunk, rows)
        reach = ring_slots(model.config.sliding_window)
    else:
        # Trees at the end reach beyond it, and what they wrote lies in the rings where older positions were.
        capacity = max(total, min(total + draft.width - 1, limit))
        state = init_state(model.config, model.mesh, capacity=capacity)
        tokens, state, count = _drafted(weights, state, token_ids, total, chunk, draft, rows)
        reach = model.config.sliding_window
    taps = {name: array[:total] for name, array in rows.joined().items()}
    return Decoded(tokens[:total], taps | dict(_cached(model.config, state, total, reach)), count)


class _Rows:
    """Taps and logits, in the order of positions."""

    def __init__(self):
        self._parts: list[dict[str, np.ndarray]] = []

    def add(self, taps: Taps, output: StepOutput, rows: "slice | np.ndarray") -> None:
        residuals, experts, weights = (np.asarray(a) for a in (taps.residuals, taps.experts, taps.weights))
        part = {"logits": np.asarray(output.logits)[rows]}
        for i in range(len(residuals)):
            part[f"layers.{i}.post_attention_residual"] = residuals[i, 0, rows]
            part[f"layers.{i}.post_feedforward_residual"] = residuals[i, 1, rows]
            part[f"layers.{i}.router_experts"] = experts[i, rows]
            part[f"layers.{i}.router_weights"] = weights[i, rows]
        self._parts.append(part)

    def add_chunk(self, count: int, taps: Taps, outputs: Callable[[], StepOutput]) -> None:
        """As a prefill calls it."""
        self.add(taps, outputs(), slice(count))

    def joined(self) -> dict[str, np.ndarray]:
        return {name: np.concatenate([part[name] for part in self._parts]) for name in self._parts[0]}


def _plain(
    weights: DecodeWeights, state: DecodeState, tokens: list[int], steps: int, chunk: int, rows: _Rows
) -> tuple[list[int], DecodeState, int]:
    """Chunked prefill, then one token per step."""
    output, state = prefill(weights, state, [tokens], chunk=chunk, on_chunk=rows.add_chunk)
    step = jax.jit(_tapped_step, donate_argnames=("state",))
    for _ in range(steps):
        tokens.append(int(output.token[0]))
        output, state, taps = step(weights, state, output.token)
        rows.add(taps, output, slice(1))
    return tokens, state, steps


def _tapped_step(weights: DecodeWeights, state: DecodeState, token: jax.Array):
    rows = next_rows(state.lengths, token)
    output, state, taps = run_step(weights, state, rows, taps=True)
    return output, dataclasses.replace(state, lengths=state.lengths + jnp.int32(1)), taps


def _drafted(
    weights: DecodeWeights, state: DecodeState, tokens: list[int], total: int, chunk: int, draft: Draft, rows: _Rows
) -> tuple[list[int], DecodeState, int]:
    """Chunked prefill, then steps of a tree each until there are `total` positions or more."""
    output, state, carry = prefill_both(weights, state, [tokens], draft, chunk=chunk, on_chunk=rows.add_chunk)
    step = jax.jit(speculative_step, static_argnames="taps", donate_argnames=("state", "carry"))
    active, token, nan, steps = jnp.ones(1, bool), output.token, output.nan, 0
    while len(tokens) < total:
        if nan[0]:
            raise ValueError(f"the logits after position {len(tokens) - 1} are NaN: with a draft nothing follows")
        root = int(token[0])
        new, state, carry = step(weights, state, draft, carry, token, active, taps=True)
        token, nan, steps = new.token, new.nan, steps + 1
        path = np.asarray(new.path)[0, : int(new.count[0] + new.nan[0])]
        tokens += [root, *np.asarray(new.tokens)[0, : len(path) - 1].tolist()]
        assert new.taps is not None
        rows.add(new.taps, new.output, path)
    weights.communicator.check()
    return tokens, state, steps


def _cached(config, state: DecodeState, length: int, reach: int) -> Iterator[tuple[str, np.ndarray]]:
    """K and V of sequence 0 by position, [positions, kv heads, 64]; of sliding layers the last `reach` positions."""
    caches = {name: np.asarray(getattr(state, name)) for name in ("k_full", "v_full", "k_ring", "v_ring")}
    index = {"full": 0, "ring": 0}
    for layer, kind_name in enumerate(config.layer_types):
        kind = "full" if kind_name == "full_attention" else "ring"
        positions = np.arange(0 if kind == "full" else max(0, length - reach), length)
        slots = positions if kind == "full" else positions % ring_slots(config.sliding_window)
        for name in ("k", "v"):
            own = caches[f"{name}_{kind}"][:, index[kind], 0][:, :, slots]  # [8, kv/8, positions, 64]
            yield f"layers.{layer}.{name}", own.reshape(-1, *own.shape[2:]).swapaxes(0, 1)
        index[kind] += 1
