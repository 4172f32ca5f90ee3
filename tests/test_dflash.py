"""DFlash and DFlash2 drafts against the NumPy oracle (tests/oracle/dflash.py) and by their properties.

Limits: the step-by-step reference makes the oracle's roundings and differs by the order of fp32 sums, which changes no
bit of most blocks; a flipped rounding changes a block by 0.1 to 0.4 % (relative rms), so the limit is 0.5 %. A
deliberate mistake is worth more than 5 % (`test_mistakes_exceed_the_limit`). That the fused call has the reference's
bits is tests/test_draft_call.py's.
"""

import dataclasses

import dflash_helpers as helpers
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dflash_helpers import (
    RING,
    SINGLE,
    V1,
    V2,
    block,
    context,
    features,
    feed,
    ints,
    lattice,
    make,
    normal,
    nothing,
    rms,
    seen,
    weights,
)
from oracle import dflash as oracle

from muse_jax.speculative import dflash_reference as model
from muse_jax.speculative.dflash import DFlashDraft, make_draft
from muse_jax.speculative.dflash_config import DFlashConfig, default_tap_layers
from muse_jax.speculative.draft import Draft
from muse_jax.speculative.tree import best_first

LIMIT = 5e-3

both = pytest.mark.parametrize("config", [V1, V2], ids=["dflash", "dflash2"])


@pytest.fixture(scope="module")
def drafts() -> dict[DFlashConfig, DFlashDraft]:
    return {config: make(config) for config in (V1, V2, SINGLE)}


def ours_and_oracle(draft: DFlashDraft, length: int, token: int = 3):
    ours, theirs = context(draft, length)
    x = block(draft, token)
    found = model.hidden_states(draft.config, draft.params, ours, x, ints(length))[0]
    return found, oracle.hidden(draft.config, weights(draft), theirs, np.asarray(x[0]), length)


# Against the oracle --------------------------------------------------------------------------------------------------


@both
@pytest.mark.parametrize("length", [0, 1, 11, 12, 13, RING - 1, RING, RING + 1, 2 * RING, 70, 7000])
def test_hidden_states(drafts, config, length):
    found, expected = ours_and_oracle(drafts[config], length)
    assert rms(found, expected) < LIMIT


@both
def test_lattice(drafts, config):
    """End to end; candidates where the oracle's logits leave no doubt."""
    draft, length, anchor = drafts[config], 40, 7
    ours, theirs = context(draft, length)
    ids, log_probs = lattice(draft, ours, ints(anchor), ints(length))
    places, k = config.block_width - 1, config.top_k
    assert ids.shape == (1, places, k) and log_probs.shape == (1, places, k if config.is_v2 else 1, k)
    w = weights(draft)
    hid = oracle.hidden(config, w, theirs, np.asarray(block(draft, anchor)[0]), length)[1:]
    u = oracle.raw_logits(hid, np.asarray(draft.head))
    falling = -np.sort(-u, axis=-1)
    sure = (falling[:, :k] - falling[:, 1 : k + 1] > 0.02) & (falling[:, :k] < np.roll(falling, 1, -1)[:, :k] - 0.1)
    sure[:, 0] = falling[:, 0] - falling[:, 1] > 0.02
    assert sure.sum() > places
    assert np.array_equal(np.asarray(ids[0])[sure], oracle.candidates(u, k)[sure])
    chosen = np.asarray(ids[0])
    if config.is_v2:
        expected = oracle.log_softmax(oracle.pair_scores(config, w, hid, u, chosen, anchor))
    else:
        expected = oracle.marginals(config, u, chosen)
    assert np.abs(np.asarray(log_probs[0]) - expected).max() < 0.25  # hidden states 1 % off, times logits of up to 10
    assert rms(log_probs[0], expected) < LIMIT


def test_stages_after_the_hidden_states(drafts):
    """From the same hidden states: integers exactly, the rest within fp32's rounding."""
    draft = drafts[V2]
    hid, anchor = normal(11, 1, 7, 128), 5
    logits = model.raw_logits(hid, draft.head)
    u = oracle.raw_logits(np.asarray(hid[0]), np.asarray(draft.head))
    assert np.abs(np.asarray(logits[0]) - u).max() < 1e-5
    u = np.asarray(logits[0], np.float64)
    ids = model.candidates(V2, logits)
    assert ids.dtype == np.int32 and np.array_equal(ids[0], oracle.candidates(u, V2.top_k))
    expected = oracle.pair_scores(V2, weights(draft), np.asarray(hid[0]), u, np.asarray(ids[0]), anchor)
    capped = model.target_logits(V2, hid, draft.head)
    scores = model.pair_scores(V2, draft.params, hid, capped, ids, ints(anchor))
    assert np.abs(np.asarray(scores[0]) - expected).max() < 2e-5
    assert (np.asarray(scores[0, 0]) == np.asarray(scores[0, 0, 0])).all()  # before place 0 comes the newest token only
    marginal = model.marginal_log_probs(model.target_logits(V1, hid, draft.head), ids)
    assert np.abs(np.asarray(marginal[0]) - oracle.marginals(V1, u, np.asarray(ids[0]))).max() < 2e-5


def test_candidates_of_equal_logits():
    """Ties to the lowest id, zeros of either sign being equal; NaN is the smallest."""
    config = V1.replace(top_k=5)
    row = np.full(96, -3.0, np.float32)
    row[[50, 20, 70]], row[[8, 4]] = 2.0, (0.0, -0.0)
    ids = model.candidates(config, jnp.asarray(row)[None, None])
    assert ids.tolist() == [[[20, 50, 70, 4, 8]]]
    head = jnp.where(jnp.arange(96)[:, None] < 90, jnp.nan, normal(1, 96, 128))
    ids = model.candidates(config, model.raw_logits(normal(2, 1, 1, 128), head))
    assert sorted(ids[0, 0].tolist()) != [] and min(ids[0, 0].tolist()) >= 90


@pytest.mark.parametrize("change", ["position", "window", "layer output", "pairing", "norm of the embedding", "causal"])
def test_mistakes_exceed_the_limit(drafts, change):
    draft, length = drafts[V2], 40
    config, w = draft.config, weights(draft)
    ours, theirs = context(draft, length)
    x = np.asarray(block(draft, 3)[0], np.float64)
    if change == "position":
        length += 1
    elif change == "window":
        config = config.replace(windows=(16, None))
    elif change == "layer output":  # one of the taps belongs to another layer
        theirs = oracle.new_context(config)
        oracle.inject(config, w, theirs, np.asarray(features(5, 70)[0, 30:, [0, 1, 1]].swapaxes(0, 1)), 0)
    elif change == "pairing":
        w = {n: a.reshape(-1, 2, 8, 128).swapaxes(1, 2).reshape(a.shape) if "q_proj" in n else a for n, a in w.items()}
    elif change == "norm of the embedding":
        x = x / np.sqrt(np.mean(x**2, -1, keepdims=True))
    expected = oracle.hidden(config, w, theirs, x if change != "causal" else x[:4], length)
    found = model.hidden_states(draft.config, draft.params, ours, block(draft, 3), ints(40))[0]
    assert rms(found[: len(expected)], expected) > 5e-2


# The context ---------------------------------------------------------------------------------------------------------


def same_context(a: model.Context, b: model.Context) -> bool:
    return all(np.array_equal(x, y) for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True))


def test_observe_in_chunks(drafts):
    draft, given = drafts[SINGLE], features(3, 12)
    start = draft.start(batch=1, capacity=helpers.CAPACITY)
    whole = helpers.observe(draft, start, seen(given, ints(12), ints(20)))
    parts = helpers.observe(draft, start, seen(given[:, :5], ints(5), ints(20)))
    parts = helpers.observe(draft, parts, seen(given[:, 5:], ints(7), ints(25)))
    assert same_context(whole, parts)
    assert sorted(whole.position[0][0].tolist())[-12:] == list(range(20, 32))


def test_rows_beyond_count_leave_no_trace(drafts):
    draft = drafts[V2]
    before, _ = context(draft, 30)
    given = features(3, 8)
    junk = given.at[:, 3:].set(jnp.nan)
    assert same_context(
        model.inject(V2, draft.params, before, given, ints(3), ints(30)),
        model.inject(V2, draft.params, before, junk, ints(3), ints(30)),
    )
    assert same_context(model.inject(V2, draft.params, before, junk, ints(0), ints(30)), before)


@pytest.mark.parametrize("count", [61, 70])
def test_more_tokens_than_the_ring_holds(drafts, count):
    draft, given = drafts[V2], features(3, 70)
    start = draft.start(batch=1, capacity=100)
    assert [k.shape[1] for k in start.k] == [RING, 100]
    whole = helpers.observe(draft, start, seen(given, ints(count), ints(9)))
    assert same_context(whole, feed(draft, start, given[:, :count], 9))
    assert sorted(whole.position[0][0].tolist()) == list(range(9 + count - RING, 9 + count))


def test_sequences_of_different_lengths_are_independent(drafts):
    draft, lengths, counts = drafts[V2], (33, 0, 7001), (8, 0, 3)
    anchors = ints(1, 2, 3)
    given = normal(8, 3, 8, 3, 128)
    singles = [context(draft, length, seed=20 + i)[0] for i, length in enumerate(lengths)]
    together = jax.tree.map(lambda *rows: jnp.concatenate(rows), *singles)
    after = model.inject(V2, draft.params, together, given, ints(*counts), ints(*lengths))
    ids, log_probs = lattice(draft, after, anchors, ints(*lengths) + ints(*counts))
    for i, (length, count) in enumerate(zip(lengths, counts, strict=True)):
        alone = model.inject(V2, draft.params, singles[i], given[i : i + 1], ints(count), ints(length))
        assert same_context(jax.tree.map(lambda rows, i=i: rows[i : i + 1], after), alone)
        expected_ids, expected = lattice(draft, alone, anchors[i : i + 1], ints(length + count))
        assert np.array_equal(ids[i], expected_ids[0]) and np.array_equal(log_probs[i], expected[0])


@pytest.mark.parametrize("distance", [1, 5, 11, 12, 13])
def test_window_edge(drafts, distance):
    """A token `distance` before row 0 is seen by the rows t with distance + t < 12, by no other."""
    draft, length = drafts[SINGLE], 40
    before, _ = context(draft, length)
    after = model.inject(SINGLE, draft.params, before, features(9, 8), ints(1), ints(length - distance))
    x = block(draft, 3)
    a, b = (model.hidden_states(SINGLE, draft.params, c, x, ints(length))[0] for c in (before, after))
    changed = (np.asarray(a) != np.asarray(b)).any(-1)
    assert changed.tolist() == [distance + t < 12 for t in range(8)]


def test_only_what_was_observed_is_seen(drafts):
    """Neither the rows of empty slots, nor what lies at or behind the block."""
    draft = drafts[V1]
    x = block(draft, 3)
    ours, theirs = context(draft, 40, observed=4)
    found = model.hidden_states(V1, draft.params, ours, x, ints(40))[0]
    assert rms(found, oracle.hidden(V1, weights(draft), theirs, np.asarray(x[0]), 40)) < LIMIT
    later = model.inject(V1, draft.params, ours, features(9, 8), ints(8), ints(40))
    assert np.array_equal(model.hidden_states(V1, draft.params, later, x, ints(40))[0], found)


# The block -----------------------------------------------------------------------------------------------------------


def test_every_row_of_the_block_sees_every_other(drafts):
    draft = drafts[SINGLE]
    ours, _ = context(draft, 20)
    x = block(draft, 3)
    for row in (0, 7):
        other = x.at[:, row].set(normal(4, 128))
        a, b = (model.hidden_states(SINGLE, draft.params, ours, y, ints(20))[0] for y in (x, other))
        assert (np.asarray(a) != np.asarray(b)).any(-1).all()


def test_convolution_reaches_one_row_back():
    """Never into another block: row 0 has none before it, in either sequence."""
    z, kernel = normal(1, 2, 8, 128), normal(2, 2, 8, 2, 128).astype(jnp.float32)
    out = np.asarray(model.convolve(z, kernel), np.float64)
    wide, k = np.asarray(z, np.float64), np.asarray(kernel, np.float64)
    assert np.array_equal(out[:, 0], oracle.to_bf16(k[:, 0, 0] * wide[:, 0]))
    assert np.array_equal(out[:, 1:], oracle.to_bf16(k[:, 1:, 0] * wide[:, 1:] + k[:, 1:, 1] * wide[:, :-1]))


def test_both_kernels_come_from_the_normed_input(drafts):
    draft, h = drafts[V2], normal(6, 1, 8, 128)
    expected = oracle.Convolution(V2, weights(draft), "layers.1.mlp_conv.", np.asarray(h[0]))
    z = normal(7, 1, 8, 128)
    for side, kernel in enumerate(model.kernels(V2, draft.params, "layers.1.mlp_conv.", h)):
        assert np.array_equal(model.convolve(z, kernel)[0], expected(np.asarray(z[0], np.float64), side))


def test_identity_kernels_give_dflash(drafts):
    """As training begins: the same hidden states, and no pair is preferred."""
    draft = drafts[V2]
    identity = dict(draft.params)
    for name, array in draft.params.items():
        if name.endswith("base_kernel"):
            identity[name] = jnp.zeros_like(array).at[:, 0].set(1)
        elif name.endswith(("kernel_projection.weight", "successor_codebook")):
            identity[name] = jnp.zeros_like(array)
    ours, _ = context(draft, 40)
    x = block(draft, 3)
    found = model.hidden_states(V2, identity, ours, x, ints(40))
    assert np.array_equal(found, model.hidden_states(V1, identity, ours, x, ints(40)))
    ids = model.candidates(V2, model.raw_logits(found, draft.head))
    logits = model.target_logits(V2, found, draft.head)
    scores = model.pair_scores(V2, identity, found, logits, ids, ints(3))
    unary = np.take_along_axis(logits, ids, -1)
    assert np.array_equal(scores, np.broadcast_to(unary[:, :, None], scores.shape))


def test_a_learned_row_may_stand_for_the_mask(drafts):
    """Otherwise it is the table's own row, without the target's norm of it."""
    draft = drafts[V1]
    assert np.array_equal(draft.mask_embedding, draft.embedding[V1.mask_token_id])
    learned = make_draft(V1, draft.params, draft.embedding, draft.head, mask_embedding=normal(1, 128))
    assert np.array_equal(learned.mask_embedding, normal(1, 128))
    ours, _ = context(draft, 40)
    a, b = (helpers.propose(d, ours, nothing(d), ints(3), ints(40))[0].token for d in (draft, learned))
    assert not np.array_equal(a, b)


# The draft -----------------------------------------------------------------------------------------------------------


@both
def test_trees(drafts, config):
    draft, length = drafts[config], 40
    as_protocol: Draft = draft
    assert as_protocol.width == 8 and as_protocol.tap_layers == (1, 2, 3)
    ours, _ = context(draft, length)
    tree, carry = helpers.propose(draft, ours, nothing(draft), ints(3), ints(length))
    assert same_context(carry, ours)
    ids, log_probs = lattice(draft, ours, ints(3), ints(length))
    token, depth = np.asarray(tree.token[0]), np.asarray(tree.depth[0])
    assert token[0] == 3 and token[1] == ids[0, 0, np.argmax(log_probs[0, 0, 0])]
    assert all(token[i] in ids[0, depth[i] - 1] for i in range(1, 8))


def test_narrower_trees(drafts):
    """A tree of fewer nodes than the block has rows is the beginning of the whole one; one node needs no draft."""
    draft, length = drafts[V2], 40
    ours, _ = context(draft, length)
    tree, _ = helpers.propose(draft, ours, nothing(draft), ints(3), ints(length))
    expected, _ = jax.jit(best_first, static_argnames="width")(
        ints(3), *lattice(draft, ours, ints(3), ints(length)), width=8
    )
    assert np.array_equal(tree.token, expected.token) and np.array_equal(tree.parent, expected.parent)
    for width in (1, 3):
        narrower = dataclasses.replace(draft, width=width)
        narrow, _ = helpers.propose(narrower, ours, nothing(narrower), ints(3), ints(length))
        assert np.array_equal(narrow.token, tree.token[:, :width])
        assert np.array_equal(narrow.parent, tree.parent[:, :width])


def test_inside_a_while_loop(drafts):
    """As the loop uses it: a pytree, static shapes, no host."""
    draft = make(V2.replace(windows=(12,), block_width=4))
    table = normal(3, 96, 3, 128)  # a target whose features depend on the token alone

    def step(draft, state):
        carry, token, length, count = state
        anchor = jnp.take_along_axis(token, count[:, None] - 1, 1)[:, 0]
        tree, carry = draft.propose(carry, seen(table[token], count - 1, length), anchor, length + count - 1)
        return carry, tree.token, length + count - 1, 2 + tree.token[:, 1] % 3

    @jax.jit
    def run(draft, state, steps):
        last = jax.lax.while_loop(lambda s: s[0] < steps, lambda s: (s[0] + 1, step(draft, s[1])), (0, state))
        return last[1]

    first = (draft.start(batch=2, capacity=64), jnp.arange(8, dtype=jnp.int32).reshape(2, 4), ints(0, 0), ints(4, 2))
    state = first
    for _ in range(6):
        state = run(draft, state, 1)
    found = run(draft, first, 6)
    assert found[2].tolist() == state[2].tolist() and min(found[2].tolist()) >= 6
    for a, b in zip(found[1:], state[1:], strict=True):
        assert np.array_equal(a, b)


@pytest.mark.parametrize("where", ["features", "norm.weight", "fc.weight", "embedding", "selector"])
def test_nan_does_no_harm_but_to_the_draft(drafts, where):
    draft = drafts[V2]
    name = "candidate_selector.hidden_projection.weight" if where == "selector" else where
    if where == "embedding":
        draft = dataclasses.replace(draft, embedding=draft.embedding * jnp.nan)
    elif name in draft.params:
        draft = dataclasses.replace(draft, params={**draft.params, name: draft.params[name] * jnp.nan})
    given = features(5, 30)
    given = given.at[:, 20].set(jnp.nan) if where == "features" else given
    carry = feed(draft, draft.start(batch=1, capacity=helpers.CAPACITY), given)
    tree, _ = helpers.propose(draft, carry, nothing(draft), ints(3), ints(30))
    token, parent = np.asarray(tree.token[0]), np.asarray(tree.parent[0])
    assert ((token >= 0) & (token < 96)).all() and (parent[1:] < np.arange(1, 8)).all() and (parent[1:] >= 0).all()
    assert len({(p, t) for p, t in zip(parent, token, strict=True)}) == 8
    if where == "features":
        assert np.isfinite(lattice(draft, carry, ints(3), ints(30))[1]).all()


def test_arrays_are_shared_and_checked(drafts):
    draft = drafts[V1]
    made = make_draft(V1, draft.params, draft.embedding, draft.head, width=3)
    assert made.embedding is draft.embedding and made.head is draft.head and made.width == 3
    leaves, tree = jax.tree.flatten(made)
    assert jax.tree.unflatten(tree, leaves).config == V1
    with pytest.raises(ValueError, match=r"width: given 9, allowed: 1 to 8"):
        make_draft(V1, draft.params, draft.embedding, draft.head, width=9)
    params = {**draft.params, "fc.weight": draft.params["fc.weight"][:1], "extra": draft.head}
    del params["norm.weight"]
    with pytest.raises(ValueError, match="do not fit") as caught:
        make_draft(V1, params, draft.embedding, draft.head[:5], mask_embedding=draft.head)
    for text in ("fc.weight: expected", "norm.weight: missing", "extra: unexpected", "head: ", "mask_embedding: "):
        assert text in str(caught.value)
    with pytest.raises(
        ValueError, match=r"features: given \[1, 8, 2, 128\], expected \[B, T, E, H\] = \[1, 8, 3, 128\]"
    ):
        draft.observe(draft.start(batch=1, capacity=9), seen(features(1, 8)[:, :, :2], ints(8), ints(0)))
    leaves = jax.tree.leaves(draft.start(batch=1, capacity=9))
    assert len({id(leaf) for leaf in leaves}) == len(leaves)  # the loop donates them
    with pytest.raises(ValueError, match="batch, capacity: given 0, 9"):
        draft.start(batch=0, capacity=9)


def test_tapped_layers():
    assert default_tap_layers(62, 5) == (1, 16, 30, 44, 59)
    assert default_tap_layers(52, 5) == (1, 13, 25, 37, 49)
    assert default_tap_layers(6, 3) == (1, 2, 3) and default_tap_layers(8, 5) == (1, 2, 3, 4, 5)
    assert default_tap_layers(6, 1) == (3,)
    for layers in range(1, 70):
        for count in range(1, max(2, layers - 2)):
            assert list(default_tap_layers(layers, count)) == oracle.taps(layers, count)
    with pytest.raises(ValueError, match="count: given 4, allowed for 6 layers: 1 to 3"):
        default_tap_layers(6, 4)
