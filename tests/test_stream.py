"""Streaming, stop strings and text: however a generation is cut up, the pieces are the whole, byte for byte."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from decode_helpers import small
from hypothesis import given
from hypothesis import strategies as st
from op_helpers import same
from test_speculative import CHAIN, Scripted, script
from tokenizers import Tokenizer, decoders, models

from muse_jax import LanguageModel, Sampling, generate, make_mesh, stream
from muse_jax.detokenizer import Detokenizer
from muse_jax.loop import advance
from muse_jax.tokenizer import byte_tokenizer
from muse_jax.weights import random_params

PROMPTS = [[5], [9, 8, 7, 6, 5, 4, 3, 2, 1], [33, 20, 61]]
COUNT = 48
# Mostly ASCII: of the other bytes those of é alone, which seldom meet.
MOSTLY_ASCII = {byte: -np.inf for byte in range(128, 256) if byte not in "é".encode()}
OPTIONS = [Sampling(temperature=t, logit_bias=MOSTLY_ASCII) for t in (0.8, 0.5, 1.2)]
VALUES = ("log_probs", "top_tokens", "top_log_probs")


@pytest.fixture(scope="module")
def model():
    """Its ids 0 to 255 are bytes, the other eight special."""
    config, mesh = small(vocab_size=264, max_position_embeddings=128), make_mesh(8)
    return LanguageModel(config, random_params(config, 43, mesh, quantized=True), mesh, byte_tokenizer())


def given_(**changes):
    keys = jax.random.split(jax.random.key(5), len(PROMPTS))
    return dict(max_new_tokens=COUNT, stop_ids=(), sampling=OPTIONS, keys=keys, logprobs=1) | changes


@pytest.fixture(scope="module")
def whole(model):
    return generate(model, PROMPTS, **given_())


@pytest.fixture(scope="module")
def draft(whole):
    return Scripted(script(PROMPTS, whole.tokens), 0.9, 6, CHAIN)


def same_result(a, b, names=VALUES):
    assert (a.tokens, a.texts, a.finish_reasons) == (b.tokens, b.texts, b.finish_reasons)
    for name in names:
        for x, y in zip(getattr(a, name), getattr(b, name), strict=True):
            same(x, y)


def joined(chunks, result):
    """Asserts that the chunks are the result, and that each sequence ends once, in its last chunk."""
    for b, reason in enumerate(result.finish_reasons):
        own = [chunk for chunk in chunks if chunk.sequence == b]
        assert [chunk.finish_reason for chunk in own] == [None] * (len(own) - 1) + [reason]
        assert [token for chunk in own for token in chunk.tokens] == result.tokens[b]
        assert "".join(chunk.text for chunk in own) == result.texts[b]
        for name in VALUES:
            same(np.concatenate([getattr(chunk, name) for chunk in own]), getattr(result, name)[b])


# Streams -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("every", [1, 7, 1000])
@pytest.mark.parametrize("drafted", [False, True])
def test_chunks_are_the_whole(model, whole, draft, every, drafted):
    """The first tokens come before any step."""
    pieces = stream(model, PROMPTS, every=every, draft=draft if drafted else None, **given_())
    chunks = list(pieces)
    assert [(chunk.sequence, len(chunk.tokens)) for chunk in chunks[:3]] == [(0, 1), (1, 1), (2, 1)]
    made = pieces.result()
    joined(chunks, made)
    same_result(made, whole)
    if not drafted:
        assert made.steps == COUNT - 1 and max(len(chunk.tokens) for chunk in chunks) == min(every, COUNT - 1)


def test_the_loop_is_compiled_once(model, whole):
    """Its results come back as they went in, also when the host has ended a sequence."""
    before = advance._cache_size()
    text = whole.texts[0]
    pieces = stream(model, PROMPTS, every=2, stop_strings=[text[4:6]], **given_())
    assert len(list(pieces)) > 20
    assert pieces.result().finish_reasons[0] == "stop_string"
    assert advance._cache_size() == before


def test_a_result_in_the_middle(model, whole):
    pieces = stream(model, PROMPTS, every=5, **given_())
    first = [next(pieces) for _ in range(4)]
    made = pieces.result()
    same_result(made, whole)
    joined([*first, *pieces], made)
    with pytest.raises(StopIteration):
        next(pieces)


def test_two_streams_in_turn(model, whole):
    other = stream(model, PROMPTS[::-1], every=3, **given_(sampling=OPTIONS[::-1], keys=given_()["keys"][::-1]))
    pairs = list(zip(stream(model, PROMPTS, every=3, **given_()), other, strict=True))
    assert len(pairs) > 30
    assert other.result().tokens == whole.tokens[::-1]


def test_a_stop_id_ends_one_sequence(model, whole):
    stop = whole.tokens[1][9]
    pieces = stream(model, PROMPTS, every=4, **given_(stop_ids=[stop]))
    joined(list(pieces), pieces.result())
    at = whole.tokens[1].index(stop)
    assert pieces.result().tokens[1] == whole.tokens[1][: at + 1]
    assert pieces.result().finish_reasons[1] == "stop"


def test_without_a_tokenizer(model, whole):
    bare = LanguageModel(model.config, model.params, model.mesh)
    assert {chunk.text for chunk in stream(bare, PROMPTS, **given_())} == {None}
    made = generate(bare, PROMPTS, **given_())
    assert made.texts is None and made.tokens == whole.tokens


# Stop strings --------------------------------------------------------------------------------------------------------


def until(tokenizer, tokens, stops):
    """By decoding every beginning anew: (tokens, text, whether a stop string ended it)."""
    for n in range(1, len(tokens) + 1):
        text = tokenizer.decode(tokens[:n]).rstrip("\ufffd")
        found = [text.find(stop) for stop in stops if stop in text]
        if found:
            return tokens[:n], text[: min(found)], True
    return tokens, tokenizer.decode(tokens), False


@pytest.mark.parametrize("drafted", [False, True])
def test_stop_strings(model, whole, draft, drafted):
    """Of one to four characters, in every text, at every place."""
    lasts = set()
    for at in range(0, 24, 5):
        parts = (text[at : at + 1 + (at + b) % 4] for b, text in enumerate(whole.texts))
        stops = [part for part in parts if part and "\ufffd" not in part]
        made = generate(model, PROMPTS, stop_strings=stops, draft=draft if drafted else None, **given_())
        for b, tokens in enumerate(whole.tokens):
            want, text, stopped = until(model.tokenizer, tokens, stops)
            assert (made.tokens[b], made.texts[b]) == (want, text)
            assert made.finish_reasons[b] == ("stop_string" if stopped else "length")
            same(made.log_probs[b], whole.log_probs[b][: len(want)])
            lasts.add(len(want))
            if drafted:
                steps = made.acceptance.accepted[b]
                assert len(want) <= 1 + steps.sum() and (len(want) == 1 or 1 + steps[:-1].sum() < len(want))
    assert len(lasts) > 5


STOPS = st.lists(st.text("abcé", min_size=1, max_size=4), max_size=3)
BYTES = st.lists(st.sampled_from([*b"abcabc ", *"é€😀".encode(), 0xFF, 256, 257]), max_size=24)


@given(BYTES, STOPS)
def test_detokenizer(tokens, stops):
    """Whole characters as soon as they are there, never a part of a stop string, nothing lost."""
    tokenizer = byte_tokenizer()
    want, text, stopped = until(tokenizer, tokens, stops)
    decoder, pieces = Detokenizer(tokenizer, stops), []
    for n, token in enumerate(tokens):
        pieces.append(decoder.add(token))
        if decoder.stopped:
            assert n + 1 == len(want)
            break
        if not stops:
            assert "".join(pieces) == tokenizer.decode(tokens[: n + 1]).rstrip("\ufffd")
    assert decoder.stopped == stopped
    assert "".join([*pieces, decoder.finish()]) == text


@given(st.lists(st.integers(0, 5), max_size=12))
def test_a_decoder_that_looks_at_its_neighbours(tokens):
    """Words whose space is dropped at a text's beginning only."""
    vocabulary = {"▁a": 0, "b": 1, "▁": 2, "▁cd": 3, "<x>": 4, "ab": 5}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="b"))
    tokenizer.decoder = decoders.Metaspace()  # type: ignore
    tokenizer.add_special_tokens(["<x>"])
    decoder = Detokenizer(tokenizer)
    assert "".join([decoder.add(token) for token in tokens] + [decoder.finish()]) == tokenizer.decode(tokens)
