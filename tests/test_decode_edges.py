"""Ties, NaN, infinities and subnormals in the fused step: the oracle's bits, and nobody else's changed."""

from __future__ import annotations

import numpy as np
import pytest
from decode_helpers import SLIDING, assert_caches, assert_values, decode_all, make_model, small, step, tapped
from op_helpers import same
from oracle import model as oracle

from muse_jax.decode import chain_rows, prefill_whole, run_layers, tree_rows

EMBED, HEAD = "embed_tokens.weight", "lm_head.weight"
GATE_0, GATE_1 = "layers.0.mlp.gate", "layers.1.mlp.gate"


@pytest.fixture(scope="module")
def model():
    return make_model(small(num_experts_per_tok=3), 17)


@pytest.fixture(scope="module")
def sliding():
    """All layers sliding, so that a NaN goes away again."""
    return make_model(small(layer_types=(SLIDING, SLIDING), layer_rope_theta=(500000.0, 0.0), sliding_window=3), 18)


def altered(model, name: str, change) -> object:
    """The model with one parameter changed by `change(array)`, in place."""
    array = np.array(model.params[name])
    change(array)
    return model.changed(**{name.replace(".", "__"): array})


def check_against_oracle(model, sequences, prompts) -> list[dict]:
    got, state = decode_all(model, sequences, prompts, chunk=16)
    for b, tokens in enumerate(sequences):
        want = model.oracle(tokens)
        assert_values(got[b], want)
        assert_caches(model, state, want, b)
        same(got[b]["token"], oracle.argmax(want["logits"]))
        same(got[b]["nan"], np.isnan(want["logits"]).any(axis=-1))
    return got


# Ties ----------------------------------------------------------------------------------------------------------------


def test_equal_router_rows_go_to_the_lowest_expert(model):
    """Experts 4 to 7 are twins of 0 to 3 and never come before them."""

    def twins(w):
        w[4:] = w[:4]

    changed = altered(altered(model, f"{GATE_1}.weight", twins), f"{GATE_1}.e_score_correction_bias", twins)
    tokens = np.random.default_rng(1).integers(0, 64, 24)
    chosen = check_against_oracle(changed, [tokens], [20])[0]["layers.1.router_experts"]
    assert (chosen[:, 1] == chosen[:, 0] + 4).all()  # both twins, the lower id first
    assert (chosen[:, 2] < 4).all()  # of the next pair only one has room


def test_all_experts_equal(model):
    def zero(w):
        w[:] = 0

    changed = altered(altered(model, f"{GATE_0}.weight", zero), f"{GATE_0}.e_score_correction_bias", zero)
    got = check_against_oracle(changed, [np.arange(9)], [5])[0]
    same(got["layers.0.router_experts"], np.tile(np.arange(3, dtype=np.int32), (9, 1)))


def test_equal_logits_go_to_the_lowest_token(model):
    """Every token of the upper half of the vocabulary has a twin in the lower half, on another rank."""

    def twins(w):
        w[32:] = w[:32]

    got = check_against_oracle(altered(model, HEAD, twins), [np.arange(20)], [13])[0]
    assert (got["token"] < 32).all() and len(set(got["token"].tolist())) > 3


def test_all_logits_equal(model):
    got = check_against_oracle(altered(model, HEAD, lambda w: w.fill(0)), [np.arange(6)], [3])[0]
    assert not got["token"].any() and not got["logits"].any()


# NaN, infinity, subnormals -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bits", [0x7FFF, 0xFFA5, 0x7F80, 0xFF80], ids=hex)
@pytest.mark.parametrize("name", ["model", "sliding"])
def test_nan_stays_in_its_sequence(request, name, bits):
    """A NaN or infinite embedding row, met in the prompt of one sequence and in a later step of another."""
    clean = request.getfixturevalue(name)

    def spoil(w):
        w.view(np.uint16)[63, 5] = bits

    broken = altered(clean, EMBED, spoil)
    rng = np.random.default_rng(2)
    sequences = [rng.integers(0, 63, n) for n in (14, 14, 9, 17)]
    sequences[1][4] = sequences[3][13] = 63
    got = check_against_oracle(broken, sequences, [8, 8, 5, 10])
    want, _ = decode_all(clean, sequences, [8, 8, 5, 10], chunk=16)
    for b in (0, 2):
        assert_values(got[b], want[b])
        assert not got[b]["nan"].any()
    for b, at in ((1, 4), (3, 13)):
        assert_values({n: x[:at] for n, x in got[b].items()}, want[b], rows=slice(0, at))
        last = at + 2 * 2 + 1 if name == "sliding" else len(sequences[b])  # two layers with a window of 3
        assert got[b]["nan"].tolist() == [at <= i < last for i in range(len(sequences[b]))]
        assert (got[b]["logits"][at:last].view(np.uint32) == 0x7FFFFFFF).all()
        assert not got[b]["token"][at:last].any()


def test_nan_is_canonical_from_the_embedding_on(model):
    """The stream before the first layer holds 0x7FFFFFFF, whatever NaN the table holds."""

    def spoil(w):
        w.view(np.uint16)[7, 0] = 0xFFA5

    stream, _, _ = run_layers(
        altered(model, EMBED, spoil).weights, model.state(), chain_rows([7], [0], [0], 1), layers=(0, 0)
    )
    assert (np.asarray(stream).view(np.uint32) == 0x7FFFFFFF).all()


def test_nan_stays_in_its_branch(model):
    """One node of a tree is NaN: it and its descendants are, and nobody else changes a bit."""

    def spoil(w):
        w.view(np.uint16)[63, 5] = 0x7FC0

    broken = altered(model, EMBED, spoil)
    parents = [-1, 0, 0, 1, 1, 2, 2, 3, 5, 7, 8]
    tokens = [3, 9, 12, 63, 5, 6, 7, 8, 9, 10, 11]
    rows = tree_rows(tokens, parents, length=0)
    below = np.array([node in (3, 7, 9) for node in range(len(tokens))])
    (got, after), (want, _) = (
        tapped(broken.weights, broken.state(), rows),
        tapped(model.weights, model.state(), rows),
    )
    assert_values({n: x[~below] for n, x in got.items()}, want, rows=~below)
    same(got["nan"], below)
    assert np.isnan(got["logits"][below]).all()
    # A draft that was NaN is overwritten like any other.
    one, _ = step(broken.weights, after, [3])
    same(np.asarray(one.logits)[0], want["logits"][0])


@pytest.mark.parametrize(
    ("name", "index", "bits"),
    [
        ("layers.0.self_attn.v_proj.weight", (70, 3), 0x7F80),
        ("layers.1.self_attn.k_proj.weight", (5, 9), 0xFF80),
        ("layers.1.self_attn.q_proj.weight", (5, 9), 0x7F80),
        ("layers.0.self_attn.gate_proj.weight", (2, 100), 0xFF80),
        ("layers.1.mlp.experts.down_proj", (2, 30, 30), 0x7F80),
        ("layers.1.mlp.pre_expert_proj.weight", (11, 12), 0x7FC1),
        ("lm_head.weight", (33, 44), 0x7FC1),
        ("lm_head.weight", (33, 44), 0x7F80),
    ],
)  # fmt: skip
def test_infinite_and_nan_weights(model, name, index, bits):
    """Nonsense in, the contract's nonsense out: NaN keys, zero values, one NaN logit, sixteen NaN experts."""

    def spoil(w):
        w.view(np.uint16)[index] = bits

    rng = np.random.default_rng(3)
    check_against_oracle(altered(model, name, spoil), [rng.integers(0, 64, 8), rng.integers(0, 64, 5)], [5, 5])


def test_nan_router_keys(model):
    """Experts whose key is NaN come last; with too few others they are chosen all the same."""

    def spoil(w):
        w[[1, 2, 5, 6, 7]] = np.nan

    broken = altered(model, f"{GATE_1}.e_score_correction_bias", spoil)
    got = check_against_oracle(broken, [np.arange(8)], [5])[0]
    assert set(got["layers.1.router_experts"].ravel().tolist()) == {0, 3, 4}

    def spoil_all(w):
        w[:] = np.nan

    broken = altered(model, f"{GATE_1}.e_score_correction_bias", spoil_all)
    got = check_against_oracle(broken, [np.arange(8)], [5])[0]
    same(got["layers.1.router_experts"], np.tile(np.arange(3, dtype=np.int32), (8, 1)))


def test_subnormals_are_kept():
    model = make_model(small(expert_formats=("bf16", "bf16")), 19)

    def shrink(columns):
        def change(w):
            w[:, columns] = (w[:, columns].astype(np.float32) * np.float32(2.0**-123)).astype(w.dtype)

        return change

    model = altered(model, EMBED, shrink(slice(3, 60)))
    model = altered(model, "layers.1.self_attn.v_proj.weight", shrink(slice(None)))
    tokens = np.random.default_rng(4).integers(0, 64, 11)
    got, state = decode_all(model, [tokens], [6], chunk=4)
    want = model.oracle(tokens)
    v = np.abs(np.asarray(want["layers.1.v"]).astype(np.float64))
    assert np.count_nonzero((v > 0) & (v < 2.0**-126)) > 20
    assert_values(got[0], want)
    assert_caches(model, state, want)
    _, whole = prefill_whole(model.config, model.state(), [tokens.tolist()], model.reference_arrays)
    assert_caches(model, whole, want)
