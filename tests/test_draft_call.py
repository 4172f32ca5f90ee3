"""The fused draft call against the step-by-step reference, bit for bit: trees, and the context after it."""

from __future__ import annotations

import dflash_helpers as helpers
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from op_helpers import same, wild

from muse_jax.mesh import make_mesh, replicated
from muse_jax.speculative import dflash_reference as reference
from muse_jax.speculative.dflash import make_draft
from muse_jax.speculative.dflash_config import DFlashConfig
from muse_jax.speculative.tree import best_first


@st.composite
def configs(draw) -> DFlashConfig:
    """Every dimension that the call has a loop over varies; heads as many as fill up 128 columns, or twice that."""
    head_dim, kv = draw(st.sampled_from([16, 32, 64, 128])), draw(st.sampled_from([1, 2]))
    heads = max(128 // head_dim, kv) * draw(st.sampled_from([1, 2]))
    heads += heads % kv
    hidden, v2 = draw(st.sampled_from([128, 256])), draw(st.booleans())
    vocab = 8 * draw(st.integers(4, 40))
    return DFlashConfig(
        vocab_size=vocab, hidden_size=hidden, num_attention_heads=heads, num_key_value_heads=kv, head_dim=head_dim,
        intermediate_size=draw(st.sampled_from([128, 256, 384])), rope_theta=draw(st.sampled_from([1e4, 5e5])),
        windows=tuple(draw(st.lists(st.sampled_from([None, 1, 5, 12, 140]), min_size=1, max_size=3))),
        rms_norm_eps=1e-5, tap_layers=tuple(range(draw(st.integers(1, 3)))), mask_token_id=vocab - 2,
        output_multiplier=draw(st.sampled_from([0.5, 2.0])), final_logit_softcapping=20.0,
        block_width=draw(st.integers(2, 16)), top_k=draw(st.integers(1, 16)),
        selector_rank=draw(st.sampled_from([8, 16, 40])) if v2 else None,
        conv_group_size=draw(st.sampled_from([4, 16, 32])) if v2 else None,
    )  # fmt: skip


def random_context(rng, config: DFlashConfig, draft, lengths: np.ndarray):
    """As observed tokens leave it, some of them missing."""
    empty = draft.start(batch=len(lengths), capacity=300)
    ks, vs, positions = [], [], []
    for k in empty.k:
        slots = k.shape[1]
        newest = lengths[:, None] - 1 - np.arange(slots)
        there = (newest >= 0) & (rng.random(newest.shape) < 0.9)
        position = np.full((len(lengths), slots), -1, np.int32)
        b, i = np.nonzero(there)
        position[b, newest[b, i] % slots] = newest[b, i]
        positions.append(jnp.asarray(position))
        ks.append(jnp.asarray(rng.standard_normal(k.shape), jnp.bfloat16))
        vs.append(jnp.asarray(rng.standard_normal(k.shape), jnp.bfloat16))
    return type(empty)(tuple(ks), tuple(vs), tuple(positions))


def same_as_reference(draft, carry, shown, token, lengths) -> None:
    config = draft.config
    tree, after = helpers.propose(draft, carry, shown, jnp.asarray(token), jnp.asarray(lengths))
    expected = reference.inject(config, draft.params, carry, shown.features, shown.count, shown.lengths)
    for a, b in zip(jax.tree.leaves(after), jax.tree.leaves(expected), strict=True):
        same(a, b)
    lattice = helpers.lattice(draft, expected, jnp.asarray(token), jnp.asarray(lengths))
    for a, b in zip(
        jax.tree.leaves(tree), jax.tree.leaves(best_first(token, *lattice, width=draft.width)[0]), strict=True
    ):
        same(a, b)


def random_draft(config, seed, data) -> None:
    """Both kinds, one to four sequences of any length, weights with NaN, infinities and huge numbers in a third, a
    feature that is nothing but NaN in half."""
    rng = np.random.default_rng(seed)
    width, batch = data.draw(st.integers(1, config.block_width)), data.draw(st.integers(1, 4))
    draft = helpers.make(config, seed % 1000, width=width)
    if data.draw(st.sampled_from([False, False, True])):
        name = data.draw(st.sampled_from(sorted(draft.params)))
        draft.params[name] = jnp.asarray(wild(rng, *draft.params[name].shape))
    lengths = rng.integers(0, 280, batch).astype(np.int32)
    fed = data.draw(st.integers(0, 20))
    count = rng.integers(0, fed + 1, batch).astype(np.int32)
    features = wild(rng, batch, fed, len(config.tap_layers), config.hidden_size)
    if fed and data.draw(st.booleans()):  # the bits that a GPU's words have before they come
        features.view(np.uint16)[:, -1] = 0xFFFF
    shown = helpers.seen(jnp.asarray(features), count, np.maximum(lengths - count, 0))
    carry = random_context(rng, config, draft, lengths)
    same_as_reference(draft, carry, shown, rng.integers(0, config.vocab_size, batch).astype(np.int32), lengths)


# Every shape is compiled for the reference, which takes most of the time.
drawn = given(configs(), st.integers(0, 2**31), st.data())
test_random_drafts = settings(max_examples=2, deadline=None)(drawn(random_draft))
test_many_random_drafts = pytest.mark.slow(settings(max_examples=100, deadline=None)(drawn(random_draft)))


EDGES = {
    "no new tokens": (helpers.V2, 2, 0),
    "convolution by four columns, one candidate": (helpers.V2.replace(conv_group_size=4, top_k=1), 2, 17),
    "a block of more keys than few": (helpers.V2.replace(block_width=40), 1, 5),
}


@pytest.mark.parametrize("edge", EDGES)
def test_edges(edge):
    config, batch, fed = EDGES[edge]
    rng, draft = np.random.default_rng(3), helpers.make(config, 5)
    lengths, count = rng.integers(0, 280, batch).astype(np.int32), rng.integers(0, fed + 1, batch).astype(np.int32)
    features = jnp.asarray(wild(rng, batch, fed, len(config.tap_layers), config.hidden_size))
    shown = helpers.seen(features, count, np.maximum(lengths - count, 0))
    carry = random_context(rng, config, draft, lengths)
    same_as_reference(draft, carry, shown, rng.integers(0, config.vocab_size, batch).astype(np.int32), lengths)


@pytest.mark.parametrize("config", [helpers.V1, helpers.V2.replace(windows=(600, None))], ids=["dflash", "dflash2"])
def test_far_positions(config):
    """Several chunks of keys, rings that have wrapped around, positions beyond 2**19."""
    rng = np.random.default_rng(0)
    draft = helpers.make(config, 3)
    lengths = np.array([700_001, 632], np.int32)
    carry = random_context(rng, config, draft, lengths)
    shown = helpers.seen(jnp.asarray(wild(rng, 2, 8, 3, 128)), np.array([8, 3], np.int32), lengths - [8, 3])
    same_as_reference(draft, carry, shown, np.array([1, 2], np.int32), lengths)


@pytest.mark.parametrize("devices", [2, 8])
def test_every_device_drafts_the_same(devices):
    mesh = make_mesh(devices)
    one = helpers.make(helpers.V2, 1)
    spread = make_draft(
        one.config, jax.device_put(one.params, replicated(mesh)),
        *(jax.device_put(x, replicated(mesh)) for x in (one.embedding, one.head)),
    )  # fmt: skip
    assert spread.mesh == mesh
    shown = helpers.seen(helpers.features(5, 8), helpers.ints(8), helpers.ints(20))
    found = [
        helpers.propose(draft, draft.start(batch=1, capacity=60), shown, helpers.ints(3), helpers.ints(28))
        for draft in (one, spread)
    ]
    for a, b in zip(*map(jax.tree.leaves, found), strict=True):
        assert len(b.addressable_shards) == devices
        for shard in b.addressable_shards:
            same(shard.data, a)


def test_the_context_is_updated_in_place():
    draft = helpers.make(helpers.V1, 1)
    shown, root = helpers.seen(helpers.features(5, 8), helpers.ints(8), helpers.ints(0)), helpers.ints(3)
    step = jax.jit(lambda draft, carry, *rest: draft.propose(carry, *rest), donate_argnums=1)
    compiled = step.lower(draft, draft.start(batch=1, capacity=60), shown, root, root).compile()
    rings = jax.tree.leaves(draft.start(batch=1, capacity=60))
    assert compiled.memory_analysis().alias_size_in_bytes == sum(x.nbytes for x in rings)
    assert " copy(" not in compiled.as_text()


@pytest.mark.parametrize(
    ("token", "count", "first", "message"),
    [
        (96, 0, 0, r"token\[0\] is 96, allowed: 0 to 95"),
        (3, 9, 0, r"count\[0\] is 9, allowed: 0 to 8"),
        (3, 2, -1, r"first position\[0\] is -1, allowed: 0 or more"),
    ],
)
def test_wrong_values(token, count, first, message):
    draft, ints = helpers.make(helpers.V1, 1), helpers.ints
    given = draft.start(batch=1, capacity=9), helpers.seen(helpers.features(1, 8), ints(count), ints(first))
    with pytest.raises(jax.errors.JaxRuntimeError, match="draft: " + message):
        jax.block_until_ready(helpers.propose(draft, *given, ints(token), ints(0)))
