"""Speculative decoding changes nothing: trees, acceptance, caches, and whole texts against plain decoding."""

from __future__ import annotations

import dataclasses
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from decode_helpers import FULL, SLIDING, drawn, small
from op_helpers import BF16, same, wild

from muse_jax.decode import MAX_ROWS, Taps, custom_calls, init_state, prefill
from muse_jax.generate import generate
from muse_jax.language_model import LanguageModel
from muse_jax.loop import advance, begin
from muse_jax.mesh import make_mesh
from muse_jax.parity import flip_bit, parity
from muse_jax.sampling import Sampling
from muse_jax.speculative import (
    DFlashConfig,
    TokenTree,
    accept,
    best_first,
    chain,
    make_tree,
    prefill_both,
)
from muse_jax.speculative.dflash_weights import random_draft
from muse_jax.weights import random_params
from muse_jax.weights.repack import repack

LIMIT = 160  # max_position_embeddings
PROMPTS = [[5], [9, 8, 7, 6, 5, 4, 3, 2, 1], [33, 20, 61], [1, 2, 3, 4, 5, 6]]


def language_model(config, seed: int, devices: int = 8, **changes) -> LanguageModel:
    mesh = make_mesh(devices)
    params = random_params(config, seed, mesh, quantized=True)
    return LanguageModel(config, params | changes, mesh)


@pytest.fixture(scope="module")
def model():
    return language_model(small(max_position_embeddings=LIMIT), 41)


# Trees ---------------------------------------------------------------------------------------------------------------


def host(tree: TokenTree) -> tuple[np.ndarray, ...]:
    return tuple(np.asarray(x)[0] for x in (tree.token, tree.parent, tree.depth, tree.ancestors))


def test_recorded_marginals():
    """Ties at -1, -1.25 and -1.5, worked out by hand."""
    scores = jnp.array([[[[-0.5, -1, -3]], [[-0.5, -0.75, -2]], [[-0.25, -3, -4]]]], jnp.float32)
    ids = jnp.array([[[10, 11, 12], [20, 21, 22], [30, 31, 32]]], jnp.int32)
    tree, score = best_first(jnp.array([1], jnp.int32), ids, scores, width=8)
    token, parent, depth, ancestors = host(tree)
    assert token.tolist() == [1, 10, 11, 20, 21, 30, 20, 30]
    assert parent.tolist() == [-1, 0, 0, 1, 1, 3, 2, 4] and depth.tolist() == [0, 1, 1, 2, 2, 3, 2, 3]
    assert score[0].tolist() == [0, -0.5, -1, -1, -1.25, -1.25, -1.5, -1.5]
    lines = ["10000000", "11000000", "10100000", "11010000", "11001000", "11010100", "10100010", "11001001"]
    assert ["".join("01"[int(x)] for x in line) for line in ancestors] == lines


def test_recorded_lattice_and_walks():
    rows = [
        [[2, 1, 0, -1]] * 4,
        [[0, 2, 1, -1], [3, 0, 0, 0], [0, 0, 1, 1], [1, 1, 1, 1]],
        [[0, 0, 4, 0], [2, 2, 0, 0], [1, 0, 0, 3], [0, 0, 0, 0]],
    ]
    scores = jax.nn.log_softmax(jnp.array([rows], jnp.float32), axis=-1)
    ids = jnp.array([[[10, 11, 12, 13], [20, 21, 22, 23], [30, 31, 32, 33]]], jnp.int32)
    tree, score = best_first(jnp.array([1], jnp.int32), ids, scores, width=8)
    token, parent, _, _ = host(tree)
    assert token.tolist() == [1, 10, 21, 11, 20, 32, 30, 31] and parent.tolist() == [-1, 0, 1, 0, 3, 4, 2, 2]
    np.testing.assert_allclose(score[0], [0, -0.4402, -0.8804, -1.4402, -1.5794, -1.6329, -1.7005, -1.7005], atol=1e-4)
    for follows, path, tokens in (
        ([10, 21, 30, 20, 32, 7, 8, 9], [0, 1, 2, 6], [10, 21, 30, 8]),
        ([11, 21, 30, 20, 31, 7, 8, 9], [0, 3, 4], [11, 20, 31]),
        ([12, 21, 30, 20, 31, 7, 8, 9], [0], [12]),
    ):
        got, _ = accept(empty(1), tree, jnp.array(follows), jnp.zeros(8, bool), jnp.ones(1, bool))
        count = int(got.count[0])
        assert got.path[0, :count].tolist() == path and got.follows[0, :count].tolist() == tokens


best_first_compiled = jax.jit(best_first, static_argnames="width")


@pytest.mark.parametrize("seed", [*range(9), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(9, 18))])
def test_best_first_takes_the_most_probable(seed):
    """Against all prefixes; parents first, falling scores, no token twice below a node, a wider tree begins with it."""
    rng = np.random.default_rng(seed)
    places, count = int(rng.integers(1, 5)), int(rng.integers(1, 5))
    rows = int(rng.choice([1, count]))
    edges = np.log(rng.dirichlet(np.ones(count), (1, places, rows))).astype(np.float32)
    if seed % 3 == 0:  # ties
        edges = np.round(edges * 2) / 2
    ids = np.stack([rng.permutation(50)[:count] for _ in range(places)])[None].astype(np.int32)
    total = sum(count**d for d in range(1, places + 1))
    width = int(rng.integers(1, min(total, 20) + 1)) + (total < 20 and seed % 2)
    width = min(width, total + 1)
    tree, score = best_first_compiled(jnp.array([99], jnp.int32), ids, edges, width=width)
    token, parent, depth, ancestors = host(tree)

    prefixes = {}
    for length in range(1, places + 1):
        for taken in itertools.product(range(count), repeat=length):
            sums = np.float32(0)
            for d, c in enumerate(taken):
                sums = np.float32(sums + edges[0, d, 0 if d == 0 or rows == 1 else taken[d - 1], c])
            prefixes[taken] = float(sums)
    best = sorted(prefixes.values(), reverse=True)[: width - 1]
    np.testing.assert_array_equal(np.asarray(score)[0, 1:], np.float32(best))
    assert (np.diff(np.asarray(score)[0]) <= 0).all()
    for i in range(1, width):
        assert 0 <= parent[i] < i and depth[i] == depth[parent[i]] + 1
        assert (ancestors[i] == (ancestors[parent[i]] | (np.arange(width) == i))).all()
    pairs = list(zip(parent[1:].tolist(), token[1:].tolist(), strict=True))
    assert len(set(pairs)) == len(pairs)
    if width > 2:
        shorter, _ = best_first_compiled(jnp.array([99], jnp.int32), ids, edges, width=width - 1)
        assert (np.asarray(shorter.parent) == parent[: width - 1]).all()


def test_numbers_that_are_none_come_last():
    edges = jnp.array([[[[np.nan, -1.0, 0.5]], [[-np.inf, np.nan, -2.0]]]], jnp.float32)
    ids = jnp.array([[[1, 2, 3], [4, 5, 6]]], jnp.int32)
    tree, score = best_first(jnp.array([0], jnp.int32), ids, edges, width=6)
    assert tree.token[0, :4].tolist() == [0, 3, 2, 6] and score[0, 1].item() == 0
    assert not np.isnan(np.asarray(score)).any()


@pytest.mark.parametrize(
    ("shapes", "width", "message"),
    [
        (((1,), (1, 2, 3), (1, 2, 2, 3)), 2, r"expected \[B\], \[B, G, K\], \[B, G, 1 or K, K\]"),
        (((2,), (1, 2, 3), (1, 2, 1, 3)), 2, "expected"),
        (((1,), (1, 2, 1), (1, 2, 1, 1)), 4, r"width is 4, allowed: 1 to 3 \(2 places of 1 candidates\)"),
        (((1,), (1, 9, 9), (1, 9, 1, 9)), 65, "width is 65, allowed: 1 to 64"),
    ],
)
def test_wrong_trees(shapes, width, message):
    token, ids, edges = (jnp.zeros(s, t) for s, t in zip(shapes, (jnp.int32, jnp.int32, jnp.float32), strict=True))
    with pytest.raises(ValueError, match=message):
        best_first(token, ids, edges, width=width)


def empty(batch: int, devices: int = 1, capacity: int = 96):
    """A state of random caches and lengths 0."""
    config = small(sliding_window=5, num_hidden_layers=3, layer_types=(SLIDING, FULL, SLIDING),
                   layer_rope_theta=(1e4, 0.0, 1e4), expert_formats=("bf16",) * 3)  # fmt: skip
    state = init_state(config, make_mesh(devices), batch=batch, capacity=capacity)
    rng = np.random.default_rng(batch)
    caches = {name: jax.device_put(wild(rng, *getattr(state, name).shape), getattr(state, name).sharding)
              for name in ("k_full", "v_full", "k_ring", "v_ring")}  # fmt: skip
    return dataclasses.replace(state, **caches)


accept_compiled = jax.jit(accept, static_argnames="tap_layers", donate_argnames="state")


@pytest.mark.parametrize(("width", "batch", "devices"), [(2, 32, 1), (5, 12, 2), (16, 4, 8), (64, 1, 4), (1, 5, 2)])
def test_accept_is_the_walk(width, batch, devices):
    """Node by node: the first child with the wanted token; some nodes are not there, some rows are NaN, siblings may
    repeat a token. The caches, and what the draft is shown, against NumPy."""
    rng = np.random.default_rng(width)
    for _ in range(6):
        start = empty(batch, devices)
        lengths = rng.integers(0, 97, batch).astype(np.int32)
        lengths[: batch // 2] = np.minimum(lengths[: batch // 2], 96 - width)
        parent = np.array([[-1, *(rng.integers(max(0, i - 3), i) for i in range(1, width))] for _ in range(batch)])
        token, chosen = (rng.integers(0, 2, (batch, width)).astype(np.int32) for _ in range(2))
        nan, active = rng.random((batch, width)) < 0.05, rng.random(batch) < 0.8
        residuals = jnp.asarray(rng.standard_normal((3, 2, batch * width, 128)), jnp.float32)
        expected = {name: np.array(getattr(start, name)) for name in ("k_full", "v_full", "k_ring", "v_ring")}
        state = dataclasses.replace(start, lengths=jax.device_put(lengths, start.lengths.sharding))
        taps = Taps(residuals, jnp.zeros(0, jnp.int32), jnp.zeros(0))
        got, state = accept_compiled(
            state, make_tree(jnp.asarray(token), jnp.asarray(parent, jnp.int32)), jnp.asarray(chosen.reshape(-1)),
            jnp.asarray(nan.reshape(-1)), jnp.asarray(active), taps, tap_layers=(0, 2),
        )  # fmt: skip
        got = jax.tree.map(np.asarray, got)
        for b in range(batch):
            there = active[b] & (lengths[b] + np.arange(width) < 96)
            wanted = np.where(nan[b] | ~there, -1, chosen[b])
            path = [0] if there[0] else []
            while path:
                nexts = [i for i in range(width) if parent[b, i] == path[-1] and token[b, i] == wanted[path[-1]]]
                if not nexts or not there[nexts[0]]:
                    break
                path.append(nexts[0])
            ended = bool(path) and bool(nan[b, path[-1]])
            filled = path + [0] * (width - len(path))
            assert got.path[b].tolist() == filled and got.follows[b].tolist() == wanted[filled].tolist()
            assert (got.nan[b], got.count[b], got.seen.count[b]) == (ended, len(path) - ended, len(path))
            assert got.token[b] == (wanted[path[-1]] if path and not ended else 0)
            assert state.lengths[b] == lengths[b] + len(path) and got.seen.lengths[b] == lengths[b]
            assert got.seen.token[b].tolist() == token[b, filled].tolist()
            shown = np.asarray(residuals)[[0, 2], 1].reshape(2, batch, width, -1)[:, b, filled].swapaxes(0, 1)
            same(got.seen.features[b], shown.astype(BF16))
            for cache in expected.values():
                slots, rows = cache.shape[4], cache[:, :, b].copy()
                for depth, node in enumerate(path):
                    cache[:, :, b, :, (lengths[b] + depth) % slots] = rows[:, :, :, (lengths[b] + node) % slots]
        for name, cache in expected.items():
            same(getattr(state, name), cache)


# Texts ---------------------------------------------------------------------------------------------------------------


RANDOM, CHAIN, STAR = range(3)


@dataclasses.dataclass(frozen=True)
class Scripted:
    """A draft that knows what comes, or thinks so: random trees of the script's tokens and of others."""

    script: jax.Array
    """int32 [B, positions]: the token at each position."""
    right: float
    """How often a node has the script's token; at 0 never."""
    width: int = dataclasses.field(metadata={"static": True})
    shape: int = RANDOM  # a leaf, as `right` is, so that tests share compiled programs
    tap_layers: tuple[int, ...] = dataclasses.field(default=(), metadata={"static": True})

    def start(self, *, batch, capacity):
        """What it has seen: the token at each position, and the sum of its features' bits."""
        return jnp.zeros((batch, capacity), jnp.int32), jnp.zeros((batch, capacity), jnp.int32)

    def observe(self, carry, seen):
        tokens, felt = carry
        place = jnp.arange(seen.token.shape[1])
        at = jnp.where(place < seen.count[:, None], seen.lengths[:, None] + place, tokens.shape[1])
        of = jnp.arange(len(at))[:, None]
        values = jax.lax.bitcast_convert_type(seen.features, jnp.uint16).astype(jnp.int32).sum(axis=(2, 3))
        return tokens.at[of, at].set(seen.token, mode="drop"), felt.at[of, at].set(values, mode="drop")

    def propose(self, carry, seen, token, lengths):
        carry = self.observe(carry, seen)
        key = jax.random.fold_in(jax.random.key(0), lengths.sum())
        shape = (token.shape[0], self.width)
        node = jnp.arange(self.width)
        parents = jnp.stack([
            jax.random.randint(key, shape, 0, jnp.maximum(node, 1)).at[:, 0].set(-1),
            jnp.broadcast_to(node - 1, shape),
            jnp.broadcast_to(jnp.where(node, 0, -1), shape),
        ])  # fmt: skip
        parent = parents[self.shape]
        tree = make_tree(jnp.broadcast_to(token[:, None], shape), parent.astype(jnp.int32))
        known = jnp.take_along_axis(self.script, (lengths[:, None] + tree.depth) % self.script.shape[1], axis=1)
        other = jax.random.randint(jax.random.fold_in(key, 1), shape, 0, 64)
        good = jax.random.uniform(jax.random.fold_in(key, 2), shape) < self.right
        wrong = jnp.where(self.right > 0, other, (known + 1) % 64)
        chosen = jnp.where(good, known, wrong).at[:, 0].set(token)
        return dataclasses.replace(tree, token=chosen.astype(jnp.int32)), carry


jax.tree_util.register_dataclass(Scripted, ["script", "right", "shape"], ["width", "tap_layers"])


def script(prompts, texts):
    """int32 [B, positions] of whole texts."""
    whole = [[*p, *t] for p, t in zip(prompts, texts, strict=True)]
    out = np.zeros((len(whole), max(map(len, whole)) + MAX_ROWS), np.int32)
    for row, text in zip(out, whole, strict=True):
        row[: len(text)] = text
    return jnp.asarray(out)


def same_generation(a, b):
    assert (a.tokens, a.finish_reasons) == (b.tokens, b.finish_reasons)
    for name in ("log_probs", "top_tokens", "top_log_probs"):
        for x, y in zip(getattr(a, name) or (), getattr(b, name) or (), strict=True):
            same(x, y)


def beginning(made, ends, reason="length"):
    """The first tokens of each sequence; all of them, for their own reason, where the end is None."""
    cut = {name: [x[:n] for x, n in zip(getattr(made, name), ends, strict=True)]
           for name in ("tokens", "log_probs", "top_tokens", "top_log_probs")}  # fmt: skip
    reasons = [old if n is None else reason for old, n in zip(made.finish_reasons, ends, strict=True)]
    return dataclasses.replace(made, finish_reasons=reasons, **cut)


DRAFTS = [
    (1.0, 16, CHAIN), (0.0, 16, RANDOM), (0.7, 16, RANDOM), (0.7, 5, CHAIN), (0.8, 16, STAR),
    (0.5, 1, CHAIN), (0.5, 2, RANDOM),
]  # fmt: skip


@pytest.fixture(scope="module")
def plain(model):
    """Sixty greedy tokens after each prompt."""
    return generate(model, PROMPTS, max_new_tokens=60, stop_ids=(), logprobs=2)


@pytest.mark.parametrize(("right", "width", "shape"), DRAFTS)
def test_greedy_text_is_the_plain_one(model, plain, right, width, shape):
    """Tokens, reasons and log-probabilities, of four prompts at once."""
    draft = Scripted(script(PROMPTS, plain.tokens), right, width, shape)
    made = generate(model, PROMPTS, max_new_tokens=60, stop_ids=(), logprobs=2, draft=draft)
    same_generation(made, plain)
    if right == 1:
        # 1 from the prefill, 59 in steps of 16; the script ends within the last.
        assert made.steps == 4 and made.acceptance.histogram[16] == 12 and made.tokens_per_step == 59 / 4
    elif right == 0:
        assert made.steps == 59 and made.tokens_per_step == 1
    assert len(made.acceptance.histogram) == width + 1


@pytest.mark.parametrize("prompts", [PROMPTS, PROMPTS[1:2]], ids=len)
def test_what_each_step_brought(model, plain, prompts):
    """Every sequence has its own acceptance: a chain is right up to where the script has an error."""
    texts = [plain.tokens[PROMPTS.index(p)] for p in prompts]
    begin, width = [len(p) for p in prompts], 16
    known = np.array(script(prompts, texts))
    errors = [set(range(begin[b] + 4 + 3 * b, begin[b] + 60, 5 + 6 * b)) for b in range(len(prompts))]
    for row, wrong in zip(known, errors, strict=True):
        row[sorted(wrong)] = (row[sorted(wrong)] + 1) % 64
    draft = Scripted(jnp.asarray(known), 1.0, width, CHAIN)
    made = generate(model, prompts, max_new_tokens=60, stop_ids=(), logprobs=2, draft=draft)
    assert made.tokens == texts
    got = made.acceptance
    for b, steps in enumerate(got.accepted):
        position = begin[b]
        for count in steps[:-1]:  # the last reaches beyond the script
            assert count == next((n for n in range(1, width) if position + n in errors[b]), width)
            position += count
        assert position < begin[b] + 59 <= position + steps[-1]
    counts = np.concatenate(got.accepted).tolist()
    assert made.steps == max(map(len, got.accepted)) and len({*map(len, got.accepted)}) == min(3, len(prompts))
    assert made.tokens_per_step == 59 * len(prompts) / len(counts)
    assert got.histogram.tolist() == [counts.count(n) for n in range(width + 1)]
    assert got.by_position.tolist() == [sum(n > d for n in counts) / len(counts) for d in range(1, width)]


@pytest.mark.parametrize("seed", range(2))
def test_sampled_text_is_the_plain_one(model, seed):
    """The same keys give the same text, with and without a draft, whatever the options."""
    options = [
        Sampling(temperature=0.8), Sampling(temperature=1.3, top_k=9), Sampling(temperature=0.7, top_p=0.8, min_p=0.02),
        Sampling(temperature=0, logit_bias={3: 0.5}),
    ]  # fmt: skip
    keys = jax.random.split(jax.random.key(seed), 4)
    given = dict(max_new_tokens=40, stop_ids=(7,), sampling=options, keys=keys, logprobs=1)
    plain = generate(model, PROMPTS, **given)
    draft = Scripted(script(PROMPTS, plain.tokens), 0.8, 16)
    same_generation(generate(model, PROMPTS, draft=draft, **given), plain)


@pytest.mark.parametrize("budget", [1, 2, 3, 5, 15, 16, 17, 18, 33])
def test_budgets(model, plain, budget):
    """Trees reach beyond the budget, texts do not."""
    draft = Scripted(script(PROMPTS, plain.tokens), 0.9, 16, CHAIN)
    made = generate(model, PROMPTS, max_new_tokens=budget, stop_ids=(), logprobs=2, draft=draft)
    same_generation(made, beginning(plain, [budget] * 4))


def test_every_stop_id(model, plain):
    """A stop id may be any node of the path, the token behind it, or the first of all."""
    draft = Scripted(script(PROMPTS, plain.tokens), 0.9, 16, CHAIN)
    for stop in sorted(set(itertools.chain(*plain.tokens)))[::2]:
        ends = [t.index(stop) + 1 if stop in t else None for t in plain.tokens]
        made = generate(model, PROMPTS, max_new_tokens=60, stop_ids=(stop,), logprobs=2, draft=draft)
        same_generation(made, beginning(plain, ends, "stop"))
    same_generation(made, generate(model, PROMPTS, max_new_tokens=60, stop_ids=(stop,), logprobs=2))


def test_to_the_last_position(model):
    """At max_position_embeddings trees are cut short, texts are not."""
    prompts = [[3] * (LIMIT - 30), [4, 5]]
    plain = generate(model, prompts, max_new_tokens=30, stop_ids=(), logprobs=0)
    draft = Scripted(script(prompts, plain.tokens), 0.9, 16, CHAIN)
    same_generation(generate(model, prompts, max_new_tokens=30, stop_ids=(), logprobs=0, draft=draft), plain)


def test_logits_that_are_no_numbers_end_the_text():
    """As in plain decoding, wherever in a path the row is."""
    config = small(max_position_embeddings=LIMIT)
    model = language_model(config, 41)
    plain = generate(model, PROMPTS, max_new_tokens=30, stop_ids=())
    bad = plain.tokens[0][7]
    embed = np.array(model.params["embed_tokens.weight"])
    embed[bad, 3] = np.nan
    broken = language_model(
        config, 41, **{"embed_tokens.weight": jax.device_put(embed, model.params["embed_tokens.weight"].sharding)}
    )
    plain = generate(broken, PROMPTS, max_new_tokens=30, stop_ids=(), logprobs=0)
    assert plain.finish_reasons[0] == "nan"
    draft = Scripted(script(PROMPTS, plain.tokens), 0.9, 16, CHAIN)
    same_generation(generate(broken, PROMPTS, max_new_tokens=30, stop_ids=(), logprobs=0, draft=draft), plain)


@pytest.mark.parametrize("seed", [*range(2), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(2, 12))])
def test_random_models(seed):
    """Any configuration, window and draft."""
    rng = np.random.default_rng(seed)
    model = language_model(drawn(seed), seed, int(rng.choice([1, 2, 4, 8])))
    vocab = min(model.config.vocab_size, 64)
    prompts = [rng.integers(0, vocab, n).tolist() for n in rng.integers(1, 40, rng.integers(1, 5))]
    plain = generate(model, prompts, max_new_tokens=50, stop_ids=(), logprobs=0)
    width = int(rng.integers(1, 17))
    draft = Scripted(script(prompts, plain.tokens), float(rng.uniform(0.3, 1)), width)
    same_generation(generate(model, prompts, max_new_tokens=50, stop_ids=(), logprobs=0, draft=draft), plain)


def test_caches_and_what_the_draft_saw(model):
    """After the loop: the committed caches are those of a prefill of the whole texts; the draft saw every committed
    token once, in order, with the features of plain decoding."""
    taps = (0, 1)
    plain = generate(model, PROMPTS, max_new_tokens=40, stop_ids=())
    draft = Scripted(script(PROMPTS, plain.tokens), 0.8, 16, tap_layers=taps)
    state = init_state(model.config, model.mesh, batch=4, capacity=96)
    first, state, carry = prefill_both(model.weights, state, PROMPTS, draft)
    stops = jnp.zeros(0, jnp.int32)
    kept = begin(model.weights, state.lengths, first, stops, None, np.int32(40), space=40, logprobs=None, drafted=True)
    kept, state, (carry, last) = advance(model.weights, state, kept, stops, None, draft, carry, np.int32(40))
    seen, felt = draft.observe(carry, last)
    lengths = np.asarray(state.lengths)
    whole = [[*p, *t] for p, t in zip(PROMPTS, np.asarray(kept.tokens).tolist(), strict=True)]
    committed = [text[: min(n, len(text))] for text, n in zip(whole, lengths, strict=True)]
    again = init_state(model.config, model.mesh, batch=4, capacity=96)
    _, again, ((seen_again, felt_again), _) = prefill_both(model.weights, again, committed, draft)
    window, ring = model.config.sliding_window, state.k_ring.shape[4]
    for b, text in enumerate(committed):
        n = len(text)
        for name in ("k_full", "v_full"):
            same(getattr(state, name)[:, :, b, :, :n], getattr(again, name)[:, :, b, :, :n])
        at = np.arange(max(0, n - window), n) % ring
        for name in ("k_ring", "v_ring"):
            same(np.asarray(getattr(state, name))[:, :, b, :, at], np.asarray(getattr(again, name))[:, :, b, :, at])
        assert seen[b, :n].tolist() == text == seen_again[b, :n].tolist()
        same(felt[b, :n], felt_again[b, :n])


def test_prefill_feeds_the_draft_in_chunks(model):
    """Prompts longer than a chunk, several in one."""
    prompts = [list(range(1, 50)) * 2, [7], [9, 8] * 20]
    draft = Scripted(jnp.zeros((3, 8), jnp.int32), 1.0, 4, tap_layers=(1,))
    state = init_state(model.config, model.mesh, batch=3, capacity=128)
    output, state, ((seen, felt), _) = prefill_both(model.weights, state, prompts, draft)
    plain, _ = prefill(model.weights, init_state(model.config, model.mesh, batch=3, capacity=128), prompts)
    same(output.logits, plain.logits)
    for b, prompt in enumerate(prompts):
        assert seen[b, : len(prompt)].tolist() == prompt and not np.asarray(seen)[b, len(prompt) :].any()
        assert np.asarray(felt)[b, : len(prompt)].all()


def test_too_many_nodes(model):
    draft = Scripted(jnp.zeros((4, 8), jnp.int32), 1.0, 17)
    with pytest.raises(ValueError, match="the draft's trees have 17 nodes, allowed for 4 prompts: 1 to 16"):
        generate(model, PROMPTS, draft=draft)


def test_a_chain_is_a_tree():
    tree = chain(jnp.arange(12, dtype=jnp.int32).reshape(2, 6))
    assert tree.depth.tolist() == [list(range(6))] * 2 and tree.width == 6
    assert (np.asarray(tree.ancestors) == np.tril(np.ones((6, 6), bool))).all()


def drafting(model, selector: bool, width: int | None = None):
    """A DFlash2 or DFlash draft of random weights."""
    config = DFlashConfig(
        vocab_size=64, hidden_size=128, num_attention_heads=8, num_key_value_heads=2, head_dim=16,
        intermediate_size=128, windows=(12, None), rope_theta=1e4, rms_norm_eps=1e-5, tap_layers=(0, 1),
        mask_token_id=63, output_multiplier=1.0, final_logit_softcapping=20.0, block_width=16, top_k=6,
        selector_rank=8 if selector else None, conv_group_size=16 if selector else None,
    )  # fmt: skip
    shared = [model.params[name] for name in ("embed_tokens.weight", "lm_head.weight")]
    return random_draft(config, jax.random.key(3), *shared, width=width)


@pytest.mark.parametrize("selector", [True, False])
def test_with_a_drafting_model(model, selector):
    """Two prompts greedy and two sampled."""
    draft = drafting(model, selector)
    options = [Sampling(temperature=t) for t in (0, 0.9, 0, 1.2)]
    given = dict(
        max_new_tokens=60, stop_ids=(), sampling=options, keys=jax.random.split(jax.random.key(0), 4), logprobs=0
    )
    same_generation(generate(model, PROMPTS, draft=draft, **given), generate(model, PROMPTS, **given))


@pytest.mark.parametrize("width", [16, 1])
def test_a_step_is_three_custom_calls(model, width):
    """Counted in the compiled loop; caches and the draft's context are updated where they are."""
    draft = drafting(model, True, width)
    state = init_state(model.config, model.mesh, batch=4, capacity=96)
    first, state, carry = prefill_both(model.weights, state, PROMPTS, draft)
    stops, count = np.full(8, -1, np.int32), np.int32(40)
    kept = begin(model.weights, state.lengths, first, stops, None, count, space=64, logprobs=None, drafted=True)
    compiled = advance.lower(model.weights, state, kept, stops, None, draft, carry, count).compile()
    names = ("muse_draft_v1", "muse_decode_layers_v1", "muse_accept_v1")
    assert custom_calls(compiled) == dict.fromkeys(names, 1)
    assert not re.search(r"all-(gather|reduce|to-all)|reduce-scatter|collective-permute", compiled.as_text())
    caches = {x.shape for x in (*jax.tree.leaves(carry[0]), state.k_full, state.k_ring)}
    shards = {",".join(map(str, (1, *shape[1:]) if shape[0] == 8 else shape)) for shape in caches}
    copied = re.findall(r"= \w+\[([\d,]+)\]\S* copy\(", compiled.as_text())
    assert not shards & set(copied)


# Parity --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("length", "shape"), [(3, RANDOM), (70, CHAIN)])
def test_parity_with_a_draft(model, length, shape):
    """Every tap of the accepted rows, beyond the ring's end; one flipped bit is found where it is."""
    prompt = np.random.default_rng(length).integers(0, 64, length).tolist()
    plain = parity(model, prompt, steps=75)
    draft = Scripted(script([prompt], [plain.tokens[length:]]), 0.8, 12, shape, tap_layers=(0,))
    report = parity(model, prompt, steps=75, draft=draft, chunk=50)
    assert report.differing_bytes == 0 and report.tokens == plain.tokens and report.against == "plain decoding"
    assert [tap.tap for tap in report.taps] == [tap.tap for tap in plain.taps] + ["tokens"]
    # Of the sliding layer's k and v only the window.
    assert [tap.bytes for tap in report.taps[2:-1]] == [tap.bytes for tap in plain.taps[2:]]
    assert 7 <= report.steps < 60
    if shape == CHAIN:
        params, _ = flip_bit(model.params, "layers.1.self_attn.v_proj.weight:3")
        weights = repack(model.config, params, model.mesh)
        report = parity(model, prompt, steps=75, draft=draft, weights=weights)
        assert report.differing_bytes and report.first.tap == "layers.1.v"


def test_parity_with_a_draft_to_the_last_position(model):
    prompt = [1, 2, 3] * 50
    draft = Scripted(jnp.zeros((1, LIMIT), jnp.int32), 0.0, 8)
    assert parity(model, prompt, steps=LIMIT - 150, draft=draft).differing_bytes == 0
    with pytest.raises(ValueError, match="steps is 11, allowed: 0 to 10"):
        parity(model, prompt, steps=LIMIT - 149, draft=draft)
