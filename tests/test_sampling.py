"""Sampling: the distribution, the filters' edges, reproducibility, log-probabilities, and what is refused."""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from decode_helpers import small
from op_helpers import same
from oracle import elementary
from oracle import model as oracle
from test_generate import LIMIT, PROMPTS, language_model

from muse_jax import Sampling, generate
from muse_jax.sampling import as_choice, choose

NAN, INF = np.nan, np.inf
GREEDY = Sampling(temperature=0)
ALL = Sampling(temperature=0.8, top_k=30, top_p=0.9, min_p=0.01, logit_bias={31: -2.0, 5: 1.5, 44: -INF})

_choose = jax.jit(choose, static_argnames="unroll")


def keys(count: int, seed: int = 0) -> jax.Array:
    return jax.random.split(jax.random.key(seed), count)


def draw(logits, sampling, keys_, position=0, unroll=False) -> np.ndarray:
    """One token for each key, of one row of logits or of a row each."""
    logits = jnp.asarray(logits, jnp.float32)
    rows = jnp.broadcast_to(logits, (len(keys_), logits.shape[-1]))
    choice = as_choice(sampling, keys_, batch=len(keys_), vocab=logits.shape[-1])
    assert choice is not None
    return np.asarray(_choose(rows, choice, jnp.full(len(keys_), position, jnp.int32), unroll=unroll))


def probabilities(logits, s: Sampling) -> np.ndarray:
    """The options in fp64, by sorting."""
    x = np.asarray(logits, np.float64).copy()
    for token, bias in s.logit_bias.items():
        x[token] += bias
    p = np.exp((x - x.max()) / s.temperature)
    order = np.argsort(-p, kind="stable")
    p[order[s.top_k or len(p) :]] = 0
    p /= p.sum()
    if s.top_p is not None:
        p[order[np.searchsorted(np.cumsum(p[order]), s.top_p) + 1 :]] = 0
    p[p < (s.min_p or 0) * p.max()] = 0
    return p / p.sum()


def by_oracle(logits, s: Sampling, key, position: int) -> int:
    """docs/numerics.md 10 in NumPy and Python's integers (all but the random bits)."""
    one = np.float32(1)
    y = np.asarray(logits, np.float32)
    bias = np.zeros_like(y)
    for token, value in s.logit_bias.items():
        bias[token] = value
    x = elementary.fma(elementary.fma(y, one, bias), one / np.float32(s.temperature or 1), np.float32(0))
    order = sorted((i for i in range(len(x)) if not np.isnan(x[i])), key=lambda i: (-x[i], i))
    if not order:
        return 0
    e = elementary.exp(elementary.fma(x, one, -x[order[0]]))
    w = {i: int(float(e[i]) * 2**28) for i in order}
    keep = order[: 1 if s.temperature == 0 else s.top_k or len(order)]
    if s.top_p is not None and s.top_p < 1:
        target = max(1, int(np.float32(sum(w[i] for i in keep)) * np.float32(s.top_p)))
        total, shortest = 0, []
        for i in keep:
            if total >= target:
                break
            shortest.append(i)
            total += w[i]
        keep = shortest
    w = {i: w[i] for i in sorted(keep) if w[i] >= math.ceil((s.min_p or 0) * 2**28)}
    total = sum(w.values())
    high = total >> 14
    words = np.asarray(jax.random.bits(jax.random.fold_in(key, position), (64, 2), jnp.uint32)).tolist()
    drawn = next(n for a, b in words if (n := (a % 2 ** high.bit_length()) * 2**14 + b % 2**14) < total)
    for i, weight in w.items():
        drawn -= weight
        if drawn < 0:
            return i
    raise AssertionError("the weights do not reach the total")


# The distribution ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(),
        Sampling(temperature=0.6),
        Sampling(temperature=3.0),
        Sampling(top_k=7),
        Sampling(top_p=0.8),
        Sampling(min_p=0.1),
        Sampling(logit_bias={3: 2.5, 5: -INF, 9: -1}),
        ALL,
    ],
    ids=str,
)
def test_the_distribution_is_softmax(sampling):
    """Chi-square of 20,000 draws with fixed keys; the limit is passed by chance once in about 10,000 tables."""
    count, vocab = 20_000, 48
    logits = np.random.default_rng(1).normal(0, 1.5, vocab)
    p = probabilities(logits, sampling)
    seen = np.bincount(draw(logits, sampling, keys(count)), minlength=vocab)
    assert not seen[p == 0].any()
    expected = p * count
    often = expected >= 5
    rare = ~often & (p > 0)
    terms = ((seen - expected) ** 2)[often] / expected[often]
    freedom = max(1, often.sum() - 1 + rare.any())
    total = terms.sum()
    if rare.any():
        total += (seen[rare].sum() - expected[rare].sum()) ** 2 / max(expected[rare].sum(), 1)
    # Wilson and Hilferty's approximation of the quantile.
    limit = freedom * (1 - 2 / (9 * freedom) + 3.72 * math.sqrt(2 / (9 * freedom))) ** 3
    assert total < limit, (total, limit)


def test_searches_written_out_are_the_same():
    """As programs for GPUs have them."""
    logits = np.random.default_rng(3).standard_normal((40, 64)).astype(np.float32) * 3
    logits[7, 5], logits[9, :4] = NAN, INF
    assert np.array_equal(draw(logits, ALL, keys(40)), draw(logits, ALL, keys(40), unroll=True))


def test_positions_are_independent():
    """One key at 4,000 positions is as good as 4,000 keys."""
    logits = jnp.broadcast_to(jnp.zeros(8, jnp.float32), (4000, 8))
    choice = as_choice(
        Sampling(), jnp.broadcast_to(jax.random.key_data(jax.random.key(5)), (4000, 2)), batch=4000, vocab=8
    )
    assert choice is not None
    seen = np.asarray(_choose(logits, choice, jnp.arange(4000, dtype=jnp.int32), unroll=False))
    assert ((np.bincount(seen, minlength=8) - 500) ** 2 / 500).sum() < 24.3  # 7 degrees, 1 in 1,000
    pairs = np.bincount(seen[:-1] * 8 + seen[1:], minlength=64)
    assert ((pairs - 62.5) ** 2 / 62.5).sum() < 103.4  # 63 degrees, 1 in 1,000


@pytest.mark.parametrize("seed", range(4))
def test_choices_are_the_oracles(seed):
    """Random rows with ties, NaN and great differences; every option at random."""
    rng = np.random.default_rng(seed)
    vocab, count = (8, 24, 200, 40)[seed], 60
    rows = np.round(rng.normal(0, rng.choice([0.3, 2, 40]), (count, vocab)) * 4).astype(np.float32) / 4
    rows[rng.random(rows.shape) < 0.05] = NAN
    options = [
        Sampling(
            temperature=float(rng.choice([0, 0.01, 0.3, 1, 1.7, 100])),
            top_k=int(rng.integers(1, vocab + 2)) if rng.random() < 0.5 else None,
            top_p=float(rng.choice([0, 0.1, 0.5, 0.95, 0.9999999, 1])) if rng.random() < 0.6 else None,
            min_p=float(rng.choice([0, 0.01, 0.5, 1])) if rng.random() < 0.5 else None,
            logit_bias={int(rng.integers(vocab)): float(rng.choice([-INF, -1.5, 7]))} if rng.random() < 0.5 else {},
        )
        for _ in range(count)
    ]
    made = draw(rows, options, keys(count, seed), position=seed)
    want = [by_oracle(r, s, k, seed) for r, s, k in zip(rows, options, keys(count, seed), strict=True)]
    assert made.tolist() == want


# Edges ---------------------------------------------------------------------------------------------------------------

TIES = [1.0, 3.0, 3.0, 0.0, 3.0, -1.0, 2.0, 2.0]


@pytest.mark.parametrize(
    ("logits", "sampling", "allowed"),
    [
        (TIES, Sampling(temperature=0, top_p=0.5, logit_bias={0: 0.5}), {1}),
        (TIES, Sampling(temperature=0, logit_bias={6: 1.5}), {6}),
        (TIES, Sampling(top_k=1), {1}),
        (TIES, Sampling(top_k=2), {1, 2}),
        (TIES, Sampling(top_k=4), {1, 2, 4, 6}),
        (TIES, Sampling(top_k=100), set(range(8))),
        (TIES, Sampling(top_p=0.0), {1}),
        (TIES, Sampling(top_p=1e-30), {1}),
        (TIES, Sampling(top_p=0.29), {1, 2}),
        (TIES, Sampling(top_p=0.5), {1, 2}),
        (TIES, Sampling(top_p=1.0), set(range(8))),
        (TIES, Sampling(top_p=1 - 1e-7), set(range(8))),
        (TIES, Sampling(min_p=1.0), {1, 2, 4}),
        (TIES, Sampling(min_p=math.exp(-1) * 0.999), {1, 2, 4, 6, 7}),
        (TIES, Sampling(min_p=0.0), set(range(8))),
        (TIES, Sampling(top_k=3, top_p=1.0), {1, 2, 4}),
        (TIES, Sampling(top_k=4, top_p=0.29), {1}),
        (TIES, Sampling(temperature=0.01), {1, 2, 4}),
        ([0.0] * 8, Sampling(top_k=3), {0, 1, 2}),
        ([0.0] * 8, Sampling(top_p=0.5), {0, 1, 2, 3}),
        ([-0.0, 0.0] * 4, Sampling(top_k=2), {0, 1}),
        ([NAN] * 8, Sampling(), {0}),
        ([NAN] * 8, Sampling(top_k=3, top_p=0.5, min_p=0.1), {0}),
        ([NAN, 1.0, NAN, 1.0, NAN, NAN, NAN, NAN], Sampling(top_k=5), {1, 3}),
        (TIES, Sampling(logit_bias={t: -INF for t in range(8) if t != 5}), {5}),
        (TIES, Sampling(logit_bias={t: -INF for t in range(8) if t != 5}, top_k=4, top_p=0.9, min_p=0.5), {5}),
        ([30.0, -30.0] * 4, Sampling(), {0, 2, 4, 6}),
        ([3e38, -3e38] * 4, Sampling(), {0, 2, 4, 6}),
    ],
    ids=str,
)
def test_edges(logits, sampling, allowed):
    """Exactly these tokens come out of 400 draws."""
    seen = draw(logits, sampling, keys(400, 3))
    assert {*seen.tolist()} == allowed


def test_the_released_vocabulary():
    """202,048 tokens, flat and peaked, against the oracle."""
    rng = np.random.default_rng(2)
    rows = np.stack([np.zeros(202_048), rng.normal(0, 3, 202_048)]).astype(np.float32)
    rows = rows[[0, 1, 0, 1, 0, 1]]
    options = [Sampling(), Sampling(), *[Sampling(top_k=50, top_p=0.9)] * 2, *[Sampling(top_p=0.9)] * 2]
    want = [by_oracle(r, s, k, 7) for r, s, k in zip(rows, options, keys(6, 9), strict=True)]
    assert draw(rows, options, keys(6, 9), position=7).tolist() == want


def test_pinned():
    """The same tokens on every machine, backend and release of JAX."""
    logits = np.arange(64, dtype=np.float32) % 11 / 4
    made = draw(logits, Sampling(temperature=1.25, top_p=0.9), keys(12, 2026), position=100)
    assert made.tolist() == PINNED


PINNED = [7, 63, 62, 27, 54, 53, 49, 63, 43, 20, 32, 14]


# The loop ------------------------------------------------------------------------------------------------------------


@functools.cache
def model(devices: int = 8):
    return language_model(small(max_position_embeddings=LIMIT), 41, devices)


def made(prompts, sampling, keys_, devices=8, count=12, **options):
    return generate(
        model(devices), prompts, max_new_tokens=count, stop_ids=(), sampling=sampling, keys=keys_, **options
    )


@pytest.fixture(scope="module")
def texts():
    return made(PROMPTS, ALL, keys(4)).tokens


def test_a_text_depends_on_its_prompt_options_and_key_alone(texts):
    assert len({*map(tuple, texts)}) == 4
    order = [2, 0, 3, 1]
    assert made([PROMPTS[b] for b in order], ALL, keys(4)[jnp.array(order)]).tokens == [texts[b] for b in order]
    for b in (0, 1):
        assert made(PROMPTS[b], ALL, keys(4)[b]).tokens == [texts[b]]
    raw = jax.random.key_data(keys(4))
    assert made(PROMPTS, [ALL] * 4, raw).tokens == texts
    assert made(PROMPTS, ALL, keys(4, seed=1)).tokens != texts


@pytest.mark.parametrize("devices", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_any_mesh(texts, devices):
    assert made(PROMPTS, ALL, keys(4), devices).tokens == texts


def test_neighbours_with_other_options(texts):
    mixed = made(PROMPTS, [ALL, GREEDY, Sampling(temperature=2.0), ALL], keys(4)).tokens
    assert (mixed[0], mixed[3]) == (texts[0], texts[3])
    assert mixed[1] == made(PROMPTS[1], None, None).tokens[0]
    assert mixed[2] == made(PROMPTS[2], Sampling(temperature=2.0), keys(4)[2]).tokens[0]


def test_a_text_goes_on_where_it_was_left(texts):
    """The position counts, not the step."""
    assert made(PROMPTS[1] + texts[1][:5], ALL, keys(4)[1], count=7).tokens == [texts[1][5:]]


def test_stop_ids(texts):
    stop = texts[0][4]
    out = generate(model(), PROMPTS, max_new_tokens=12, stop_ids=[stop], sampling=ALL, keys=keys(4))
    for tokens, reason, whole in zip(out.tokens, out.finish_reasons, texts, strict=True):
        end = whole.index(stop) + 1 if stop in whole else len(whole)
        assert tokens == whole[:end] and reason == ("stop" if stop in whole else "length")


def test_greedy_is_unchanged():
    want = made(PROMPTS, None, None).tokens
    assert made(PROMPTS, GREEDY, None).tokens == want
    assert made(PROMPTS, Sampling(top_k=1), keys(4)).tokens == want
    assert made(PROMPTS, Sampling(temperature=0, logit_bias={want[0][0]: 0.0}), None).tokens == want
    assert made(PROMPTS, None, None, logprobs=3).tokens == want
    assert made(PROMPTS, None, None).log_probs is None


@pytest.mark.parametrize("sampling", [None, ALL])
def test_log_probs_are_the_references(sampling):
    out = made(PROMPTS, sampling, sampling and keys(4), logprobs=3)
    assert out.log_probs is not None and out.top_tokens is not None and out.top_log_probs is not None
    for prompt, tokens, own, top, values in zip(
        PROMPTS, out.tokens, out.log_probs, out.top_tokens, out.top_log_probs, strict=True
    ):
        text, begin = prompt + tokens, len(prompt) - 1
        same(own, np.asarray(model().log_probs([text]))[0, begin:])
        logits = np.asarray(model().reference([text]))[0, begin:-1]
        assert top.tolist() == np.argsort(-logits, axis=1, kind="stable")[:, :3].tolist()
        for column in range(3):
            same(values[:, column], oracle.log_prob(logits, top[:, column]))
        assert (values[:, :-1] >= values[:, 1:]).all()


def test_log_probs_of_the_tokens_alone():
    out, more = (made(PROMPTS, None, None, logprobs=n) for n in (0, 3))
    assert out.log_probs is not None and out.top_tokens is None and out.top_log_probs is None
    for own, same_own in zip(out.log_probs, more.log_probs, strict=True):
        same(own, same_own)
