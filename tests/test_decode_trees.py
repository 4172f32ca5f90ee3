"""Draft trees: a row has the bits of plain decoding of its path; a step that is not committed leaves no trace."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from decode_helpers import FULL, SLIDING, assert_values, cached, make_model, one_layer, small, step, tapped
from hypothesis import given, settings
from hypothesis import strategies as st
from op_helpers import same

from muse_jax.decode import MAX_ROWS, Rows, chain_rows, next_rows, tree_rows

WINDOW = 9
RING = 80  # slots of a sliding layer with this window
CAPACITY = 336
# Around nothing, the window, blocks of 16, the ring's end and the chunk of 128 positions.
LENGTHS = (0, 1, *range(WINDOW - 2, WINDOW + 3), 15, 16, 17, 48, RING - 1, RING, RING + 1, 126, 130, 257)


@pytest.fixture(scope="module")
def model():
    config = small(
        num_hidden_layers=3, layer_types=(SLIDING, FULL, SLIDING), layer_rope_theta=(500000.0, 0.0, 0.0),
        expert_formats=("nvfp4", "bf16", "nvfp4"), sliding_window=WINDOW, vocab_size=72,
    )  # fmt: skip
    return make_model(config, 5)


@pytest.fixture(scope="module")
def text(model):
    return np.random.default_rng(21).integers(0, model.config.vocab_size, CAPACITY).tolist()


def pad(rows: Rows, size: int = MAX_ROWS) -> Rows:
    """Inactive rows behind the active ones, so that steps of all sizes share one compiled program."""
    more = size - rows.token.shape[0]
    return Rows(
        jnp.pad(rows.token, (0, more), constant_values=-5),  # an inactive row's values are not looked at
        jnp.pad(rows.sequence, (0, more), constant_values=-1),
        jnp.pad(rows.position, (0, more), constant_values=-7),
        jnp.pad(rows.ancestors, ((0, more), (0, more))),
    )


def permute(rows: Rows, order) -> Rows:
    order = np.asarray(order)
    return Rows(rows.token[order], rows.sequence[order], rows.position[order], rows.ancestors[order][:, order])


def join(*parts: Rows) -> Rows:
    """Rows of several sequences in one step."""
    token, sequence, position = (
        jnp.concatenate([getattr(p, name) for p in parts]) for name in ("token", "sequence", "position")
    )
    return Rows(token, sequence, position, jax.scipy.linalg.block_diag(*(p.ancestors for p in parts)).astype(bool))


def append(model, state, tokens, sequence: int = 0):
    """Commit tokens to a sequence, 64 rows a step."""
    for begin in range(0, len(tokens), MAX_ROWS):
        part = tokens[begin : begin + MAX_ROWS]
        first = int(state.lengths[sequence])
        rows = chain_rows(part, [sequence] * len(part), [first + i for i in range(len(part))], MAX_ROWS)
        _, state = tapped(model.weights, state, rows, commit=True)
    return state


def random_tree(rng: np.random.Generator, count: int, vocab: int) -> tuple[list[int], list[int]]:
    """(tokens, parents); some trees are deep, some wide, some are forests, siblings may hold the same token."""
    deep = rng.random()
    parents = [-1]
    for node in range(1, count):
        parents.append(node - 1 if rng.random() < deep else int(rng.integers(-1 if rng.random() < 0.1 else 0, node)))
    return rng.integers(0, vocab, count).tolist(), parents


def plain(model, state, tokens, parents, sequence: int = 0) -> dict[str, np.ndarray]:
    """What plain decoding, one token a step from `state`, gives for the path to every node."""
    states, values = {-1: state}, []
    for node, (token, parent) in enumerate(zip(tokens, parents, strict=True)):
        given_tokens = jnp.full(state.batch, token, jnp.int32)
        rows = next_rows(states[parent].lengths, given_tokens, jnp.arange(state.batch) == sequence)
        got, states[node] = tapped(model.weights, states[parent], rows, commit=True)
        values.append({name: x[sequence] for name, x in got.items()})
    return {name: np.stack([v[name] for v in values]) for name in values[0]}


def first_rows(values: dict, count: int) -> dict:
    return {name: x[:count] for name, x in values.items()}


def assert_tree(model, state, tokens, parents, length: int) -> None:
    values, after = tapped(model.weights, state, pad(tree_rows(tokens, parents, length=length)))
    assert_values(first_rows(values, len(tokens)), plain(model, state, tokens, parents))
    assert after.lengths.tolist() == state.lengths.tolist()


# Paths ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", LENGTHS)
def test_tree_rows_are_plain_decoding_of_their_paths(model, text, length):
    rng = np.random.default_rng(length)
    state = append(model, model.state(capacity=CAPACITY), text[:length])
    tokens, parents = random_tree(rng, 40, model.config.vocab_size)
    assert_tree(model, state, tokens, parents, length)


@pytest.mark.parametrize("length", [0, 3, 70, 100])
def test_chain_of_64_is_64_single_steps(model, text, length):
    state = append(model, model.state(capacity=CAPACITY), text[:length])
    tokens = text[length : length + MAX_ROWS]
    assert_tree(model, state, tokens, range(-1, MAX_ROWS - 1), length)


@settings(max_examples=8, derandomize=True, database=None)
@given(length=st.integers(0, 200), seed=st.integers(0, 2**32 - 1), count=st.integers(1, 24))
def test_random_trees(model, text, length, seed, count):
    state = append(model, model.state(capacity=CAPACITY), text[:length])
    tokens, parents = random_tree(np.random.default_rng(seed), count, model.config.vocab_size)
    assert_tree(model, state, tokens, parents, length)


def test_root_with_63_children(model, text):
    """Rows at the same position, more than a block of them, side by side in the cache."""
    state = append(model, model.state(capacity=CAPACITY), text[:30])
    tokens = (np.arange(MAX_ROWS) * 7 % model.config.vocab_size).tolist()
    assert_tree(model, state, tokens, [-1] + [0] * 63, 30)


def test_one_path_against_the_oracle(model, text):
    """Not through plain decoding: the path as a sequence of its own."""
    state = append(model, model.state(capacity=CAPACITY), text[:14])
    tokens, parents = random_tree(np.random.default_rng(3), 20, model.config.vocab_size)
    values, _ = tapped(model.weights, state, pad(tree_rows(tokens, parents, length=14)))
    path = [19]
    while parents[path[0]] >= 0:
        path.insert(0, parents[path[0]])
    want = model.oracle(text[:14] + [tokens[node] for node in path])
    for name in ("logits", "layers.0.post_attention_residual", "layers.2.post_feedforward_residual"):
        same(values[name][path], want[name][14:])


@pytest.mark.parametrize("kind", [FULL, SLIDING])
def test_across_position_2048(kind):
    """A tree over the end of a group of 2048 positions, where the sums of the chunks are added up."""
    model = make_model(one_layer(kind, sliding_window=40), 6)
    text = np.random.default_rng(7).integers(0, 64, 2060).tolist()
    length = 2043
    state = append(model, model.state(capacity=2128), text[:length])
    tokens, parents = random_tree(np.random.default_rng(8), 24, 64)
    tokens[:10], parents[:10] = text[length : length + 10], range(-1, 9)  # one path surely crosses
    assert_tree(model, state, tokens, parents, length)
    values, _ = tapped(model.weights, state, pad(tree_rows(tokens, parents, length=length)))
    reference = model.reference([text[: length + 10]])["logits"][0]
    same(values["logits"][:10], reference[length:])


# Rows ----------------------------------------------------------------------------------------------------------------


def test_two_sequences_with_trees_in_one_step(model, text):
    state = append(model, append(model, model.state(2, CAPACITY), text[:21]), text[100:190], 1)
    rng = np.random.default_rng(9)
    trees = [random_tree(rng, n, model.config.vocab_size) for n in (25, 39)]
    lengths = (21, 90)
    parts = [tree_rows(*trees[b], length=lengths[b], sequence=b) for b in (0, 1)]
    want = [plain(model, state, *trees[b], b) for b in (0, 1)]
    joined = {name: np.concatenate([w[name] for w in want]) for name in want[0]}
    values, _ = tapped(model.weights, state, join(*parts))
    assert_values(values, joined)
    order = rng.permutation(MAX_ROWS)  # interleaved, children before their parents
    values, after = tapped(model.weights, state, permute(join(*parts), order))
    assert_values(values, joined, rows=order)
    assert after.lengths.tolist() == list(lengths)


def test_inactive_rows_yield_zeros(model, text):
    state = append(model, model.state(capacity=CAPACITY), text[:33])
    tokens, parents = random_tree(np.random.default_rng(10), 30, model.config.vocab_size)
    want, want_state = tapped(model.weights, state, pad(tree_rows(tokens, parents, length=33)))
    order = np.random.default_rng(11).permutation(MAX_ROWS)
    order = np.concatenate([order[order >= 30][:17], np.arange(30), order[order >= 30][17:]])
    values, got_state = tapped(model.weights, state, permute(pad(tree_rows(tokens, parents, length=33)), order))
    rows, zeros = slice(17, 47), np.r_[0:17, 47:64]
    assert_values({n: x[rows] for n, x in values.items()}, want, rows=slice(0, 30))
    for name, x in values.items():
        assert (x[zeros] == (-1 if name == "token" else 0)).all(), name
        same(x[zeros], np.full_like(x[zeros], -1 if name == "token" else 0))
    for name in ("k_full", "v_full", "k_ring", "v_ring"):
        same(getattr(got_state, name), getattr(want_state, name))


def test_only_inactive_rows(model, text):
    state = append(model, model.state(capacity=CAPACITY), text[:5])
    rows = pad(tree_rows([1], [-1], length=5))
    values, after = tapped(model.weights, state, Rows(rows.token, jnp.full(64, -1), rows.position, rows.ancestors))
    assert not values["logits"].any() and (values["token"] == -1).all() and not values["nan"].any()
    for name in ("k_full", "v_full", "k_ring", "v_ring"):
        same(getattr(after, name), getattr(state, name))


# What a step leaves behind -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [0, 5, WINDOW, 40, RING - 10, RING + 20, 120])
def test_a_tree_leaves_no_trace(model, text, length):
    """Committed positions keep their bits, and what is decoded afterwards has those of never having drafted."""
    state = append(model, model.state(capacity=CAPACITY), text[:length])
    before = cached(model, state)
    drafted = state
    for seed in range(2):
        tokens, parents = random_tree(np.random.default_rng(seed), MAX_ROWS, model.config.vocab_size)
        _, drafted = tapped(model.weights, drafted, pad(tree_rows(tokens, parents, length=length)))
    for name, (first, values) in cached(model, drafted).items():
        assert first == before[name][0]
        same(values, before[name][1])
    for token in text[length : length + 20]:
        want, state = step(model.weights, state, [token])
        got, drafted = step(model.weights, drafted, [token])
        for name in ("logits", "token", "nan"):
            same(getattr(got, name), getattr(want, name))
    for name, (_, values) in cached(model, drafted).items():
        same(values, cached(model, state)[name][1])


def test_chain_then_commit_is_prefill(model, text):
    """Rows that form a chain stay in their slots: committing them is counting them."""
    state = append(model, model.state(capacity=CAPACITY), text[:90])
    want = cached(model, append(model, state, text[90:120]))
    rows = chain_rows(text[90:120], [0] * 30, list(range(90, 120)), MAX_ROWS)
    _, state = tapped(model.weights, state, rows, commit=True)
    assert state.lengths.tolist() == [120]
    for name, (_, values) in cached(model, state).items():
        same(values, want[name][1])
