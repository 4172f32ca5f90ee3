"""Generation, greedy or sampled, at once or as a stream: `lax.while_loop`s of fused steps, on GPUs CUDA graphs."""

import collections
import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from muse_jax.decode import MAX_ROWS, Prompts, as_prompts, init_state, prefill
from muse_jax.decoded import check_draft, check_model
from muse_jax.detokenizer import UNFINISHED, Detokenizer, is_text
from muse_jax.generation import Acceptance, Chunk, Generation
from muse_jax.guarantee import guarantee
from muse_jax.kept import FINISH_REASONS, STOP_STRING, VALUES
from muse_jax.loop import advance, begin
from muse_jax.mesh import own_mesh, replicated
from muse_jax.profiling import host_phase
from muse_jax.sampling import MAX_LOGPROBS, Sampling, as_choice, is_whole
from muse_jax.speculative import Draft, NoDraft, prefill_both

if TYPE_CHECKING:
    from muse_jax.language_model import LanguageModel

EVERY = 8
"""Steps between two looks of the host at what the loop has kept, where it must look."""
STOPS, SPACE = 8, 64
"""Stop ids and places for new tokens are rounded up to multiples of these, so that other numbers of them find the
programs already compiled."""


def generate(
    model: "LanguageModel",
    prompt_ids: Prompts,
    *,
    max_new_tokens: int = 64,
    stop_ids: Sequence[int] | None = None,
    stop_strings: Sequence[str] = (),
    sampling: Sampling | Sequence[Sampling] | None = None,
    keys: Any = None,
    logprobs: int | None = None,
    draft: Draft | None = None,
) -> Generation:
    """Continue prompts, greedily unless `sampling` says otherwise.

    A prompt's continuation has the same bits whatever the batch, its order and the mesh; a sampled one depends on the
    prompt, its options and its key alone. Without stop strings the host is not asked before the end.

    Args:
        model: a loaded model.
        prompt_ids: token ids of one prompt, or of up to 64 prompts of any lengths.
        max_new_tokens: at least 1.
        stop_ids: ids that end a sequence; the configuration's eos_token_ids by default.
        stop_strings: texts that end a sequence, which needs the model's tokenizer. Its text ends before the string, its
            tokens with the one that completes it.
        sampling: options for all prompts, or one per prompt.
        keys: one JAX key per prompt (threefry2x32), where anything is sampled; an error without `sampling`.
        logprobs: also return log-probabilities, of the tokens (0) and of so many most probable ones at each place.
        draft: proposes tokens, of which a step keeps those that the model itself would have chosen: the same text and
            log-probabilities in fewer steps.

    Raises:
        ValueError: an empty prompt, ids out of range, options or keys that do not fit, prompt and new tokens beyond
            max_position_embeddings, more tree nodes than a step has rows, or stop strings without a tokenizer.
        TypeError: prompts, options, keys or stop strings of another kind, or a call inside jit, scan or vmap.
    """
    return GenerationStream(
        model, prompt_ids, max_new_tokens=max_new_tokens, stop_ids=stop_ids, stop_strings=stop_strings,
        sampling=sampling, keys=keys, logprobs=logprobs, draft=draft, every=EVERY if stop_strings else max_new_tokens,
    ).result()  # fmt: skip


def stream(
    model: "LanguageModel",
    prompt_ids: Prompts,
    *,
    max_new_tokens: int = 64,
    stop_ids: Sequence[int] | None = None,
    stop_strings: Sequence[str] = (),
    sampling: Sampling | Sequence[Sampling] | None = None,
    keys: Any = None,
    logprobs: int | None = None,
    draft: Draft | None = None,
    every: int = EVERY,
) -> "GenerationStream":
    """`generate`, piece by piece: the same tokens and bytes, whatever `every` is.

    The prompts are read in this call, and what is wrong with the arguments raised; steps run when chunks are asked for.

    Args:
        model: as in `generate`.
        prompt_ids: as in `generate`.
        max_new_tokens: as in `generate`.
        stop_ids: as in `generate`.
        stop_strings: as in `generate`.
        sampling: as in `generate`.
        keys: as in `generate`.
        logprobs: as in `generate`.
        draft: as in `generate`.
        every: decode steps between two looks of the host, at least 1. Fewer bring chunks sooner and cost more looks.

    Returns:
        An iterator over chunks, the first of them with the tokens that follow the prompts.

    Raises:
        ValueError, TypeError: as `generate`.
    """
    if not is_whole(every) or every < 1:
        raise ValueError(f"every is {every!r}, allowed: whole numbers from 1 on (decode steps)")
    return GenerationStream(
        model, prompt_ids, max_new_tokens=max_new_tokens, stop_ids=stop_ids, stop_strings=stop_strings,
        sampling=sampling, keys=keys, logprobs=logprobs, draft=draft, every=every,
    )  # fmt: skip


class GenerationStream(Iterator[Chunk]):
    """What `stream` returns: chunks in the order in which they come, and the whole at the end."""

    def __init__(
        self, model: "LanguageModel", prompt_ids: Any, *, max_new_tokens: int, stop_ids: Sequence[int] | None,
        stop_strings: Sequence[str], sampling: Any, keys: Any, logprobs: int | None, draft: Draft | None, every: int,
    ):  # fmt: skip
        """Prompts into the caches, and the first tokens; arguments and errors as `stream`."""
        check_model(model)
        check_draft(draft)
        prompts = as_prompts(prompt_ids)
        stops = tuple(model.config.eos_token_ids if stop_ids is None else np.atleast_1d(np.asarray(stop_ids)).tolist())
        _check(model, prompts, max_new_tokens, stops, logprobs)
        stop_strings = check_stop_strings(stop_strings)
        if stop_strings and model.tokenizer is None:
            raise ValueError(
                "stop_strings need the model's tokenizer: copy its tokenizer.json into the checkpoint's folder, or "
                "give stop_ids"
            )
        batch, width = len(prompts), 1 if draft is None else draft.width
        if not 1 <= width <= (most := max(1, MAX_ROWS // batch)):
            raise ValueError(
                f"the draft's trees have {width} nodes, allowed for {batch} prompts: 1 to {most} "
                f"(a step has {MAX_ROWS} rows)"
            )
        self._model, self._every, self._width = model, every, None if draft is None else width
        self._weights = model.weights
        choice = as_choice(sampling, keys, batch=batch, vocab=model.config.vocab_size)
        padding = (-1,) * (-len(stops) % STOPS if stops else STOPS)
        given = choice, np.array(stops + padding, np.int32)
        self._choice, self._stops = jax.device_put(given, replicated(model.mesh))

        # Trees at the end of a text reach beyond it, as far as there are positions.
        longest = max(map(len, prompts)) + max_new_tokens
        capacity = min(longest + width - 1, model.config.max_position_embeddings)
        space = -(-max_new_tokens // SPACE) * SPACE
        self._draft = NoDraft() if draft is None else draft
        with own_mesh(model.mesh):
            state = init_state(model.config, model.mesh, batch=batch, capacity=capacity)
            if draft is None:
                (first, self._state), self._carry = prefill(model.weights, state, prompts), ()
            else:
                first, self._state, self._carry = prefill_both(model.weights, state, prompts, draft)
            self._kept = begin(
                model.weights, self._state.lengths, first, self._stops, self._choice, np.int32(max_new_tokens),
                space=space, logprobs=logprobs, drafted=draft is not None,
            )  # fmt: skip

        tokenizer = model.tokenizer
        self._decoders = None if tokenizer is None else [Detokenizer(tokenizer, stop_strings) for _ in prompts]
        self._texts, self._counts = [""] * batch, [0] * batch
        self._reasons: list[str | None] = [None] * batch
        self._chunks: collections.deque[Chunk] = collections.deque()
        self._look()

    def __next__(self) -> Chunk:
        """The next chunk; runs steps if there is none left."""
        while not self._chunks:
            if None not in self._reasons:
                raise StopIteration
            self._advance()
        return self._chunks.popleft()

    def result(self) -> Generation:
        """The whole generation, those parts included that were iterated over; runs what has not run yet."""
        while None in self._reasons:
            self._advance()
        kept, counts = self._seen, self._counts

        def texts(rows: np.ndarray | None) -> list[np.ndarray] | None:
            return None if rows is None else [row[:n] for row, n in zip(rows, counts, strict=True)]

        return Generation(
            tokens=[row[:n].tolist() for row, n in zip(kept.tokens, counts, strict=True)],
            texts=None if self._decoders is None else list(self._texts),
            finish_reasons=[reason for reason in self._reasons if reason is not None],
            steps=int(kept.steps),
            guarantee=guarantee(self._model.mesh),
            log_probs=texts(kept.log_probs),
            top_tokens=texts(kept.top_tokens) if kept.logprobs else None,
            top_log_probs=texts(kept.top_log_probs) if kept.logprobs else None,
            acceptance=None if self._width is None else Acceptance(self._accepted(), self._width),
        )

    @host_phase("muse_steps")
    def _advance(self) -> None:
        """So many steps, fewer if all sequences end before."""
        if self._model.weights is not self._weights:
            raise ValueError(
                "the model was updated after this text was begun, its caches are of the old weights; start anew"
            )
        until = np.int32(self._seen.steps + self._every)
        with own_mesh(self._model.mesh):
            self._kept, self._state, self._carry = advance(
                self._weights, self._state, self._kept, self._stops, self._choice, self._draft, self._carry, until
            )
        self._look()

    @host_phase("muse_look")
    def _look(self) -> None:
        """Chunks of what was kept since the last look; sequences that reached a stop string are ended."""
        self._seen = kept = jax.tree.map(np.asarray, self._kept)
        self._model.weights.communicator.check()
        for b in range(len(self._counts)):
            if self._reasons[b] is None:
                self._chunk_of(b)
        going = kept.active & np.array([reason is None for reason in self._reasons])
        if (going != kept.active).any():
            self._kept = dataclasses.replace(self._kept, active=jax.device_put(going, self._kept.active.sharding))

    def _chunk_of(self, b: int) -> None:
        kept, start, end = self._seen, self._counts[b], int(self._seen.count[b])
        reason = None if kept.active[b] else FINISH_REASONS[kept.reason[b]]
        text = None
        if self._decoders is not None:
            decoder, text = self._decoders[b], ""
            for n in range(start, end):
                text += decoder.add(int(kept.tokens[b, n]))
                if decoder.stopped:
                    end, reason = n + 1, FINISH_REASONS[STOP_STRING]
                    break
            if reason is not None:
                text += decoder.finish()
            self._texts[b] += text
        self._counts[b], self._reasons[b] = end, reason
        if end > start or reason is not None:
            names = VALUES if kept.logprobs else VALUES[:1] if kept.logprobs == 0 else ()
            values = {name: getattr(kept, name)[b, start:end] for name in names}
            self._chunks.append(Chunk(b, kept.tokens[b, start:end].tolist(), text, reason, **values))

    def _accepted(self) -> list[np.ndarray]:
        """By sequence; steps after a stop string are none."""
        rows = []
        for row, n, reason in zip(self._seen.accepted, self._counts, self._reasons, strict=True):
            steps = row[row >= 0]
            if reason == FINISH_REASONS[STOP_STRING]:
                steps = steps[1 + steps.cumsum() - steps < n]  # the first token is the prefill's
            rows.append(steps)
        return rows


def _check(
    model: "LanguageModel",
    prompts: list[list[int]],
    max_new_tokens: int,
    stops: Sequence[int],
    logprobs: int | None,
) -> None:
    if logprobs is not None and (
        not is_whole(logprobs) or not 0 <= logprobs <= min(MAX_LOGPROBS, model.config.vocab_size)
    ):
        raise ValueError(
            f"logprobs is {logprobs!r}, allowed: 0 (the tokens' own alone) to {MAX_LOGPROBS}, or None to leave them out"
        )
    vocab, limit = model.config.vocab_size, model.config.max_position_embeddings
    if not is_whole(max_new_tokens) or max_new_tokens < 1:
        raise ValueError(f"max_new_tokens is {max_new_tokens!r}, allowed: whole numbers from 1 on")
    if not prompts:
        raise ValueError("prompt_ids is empty; give at least one token id")
    for b, prompt in enumerate(prompts):
        if not prompt:
            raise ValueError(f"prompt {b} is empty; start it with the beginning-of-text id {model.config.bos_token_id}")
        if len(prompt) + max_new_tokens > limit:
            raise ValueError(
                f"prompt {b} has {len(prompt)} tokens and max_new_tokens is {max_new_tokens}, together more than the "
                f"model's {limit} positions (max_position_embeddings)"
            )
    for stop in stops:
        if not isinstance(stop, int) or not 0 <= stop < vocab:
            raise ValueError(f"stop id {stop!r} is not a token, allowed: 0 to {vocab - 1}")


def check_stop_strings(given: Any) -> tuple[str, ...]:
    """The stop strings, once each is known to be one; errors as `generate`."""
    stop_strings: tuple[Any, ...] = (given,) if not isinstance(given, Iterable) else tuple(given)
    if isinstance(given, str) or not all(isinstance(s, str) for s in stop_strings):
        raise TypeError(f"stop_strings is {given!r}, expected a list of strings")
    for string in stop_strings:
        if not string or UNFINISHED in string or not is_text(string):
            raise ValueError(
                f"stop_strings holds {string!r}, allowed: texts that are not empty and have no U+FFFD, which stands "
                "for bytes that are no character, and no surrogates"
            )
    return stop_strings
