"""Wrong shapes, dtypes and transformations of the fused step: refused with a sentence that says what is expected."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from decode_helpers import make_model, small, step
from op_helpers import same

from muse_jax.decode import (
    MAX_ROWS,
    decode_step,
    init_state,
    next_rows,
    prefill,
    prefill_whole,
    run_head,
    run_layers,
    tree_rows,
)
from muse_jax.decode import step as step_module

RuntimeFailure = jax.errors.JaxRuntimeError


@pytest.fixture(scope="module")
def model():
    return make_model(small(), 23)


def rows_for(count: int):
    return next_rows(jnp.zeros(count, jnp.int32), jnp.zeros(count, jnp.int32))


# Refused while tracing -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"token": jnp.zeros(2, jnp.float32)}, r"rows.token is float32\[2\], expected int32\[2\]"),
        ({"token": jnp.zeros(2, jnp.int16)}, r"rows.token is int16\[2\], expected int32\[2\]"),
        ({"sequence": jnp.zeros(3, jnp.int32)}, r"rows.sequence is int32\[3\], expected int32\[2\]"),
        ({"position": jnp.zeros((2, 1), jnp.int32)}, r"rows.position is int32\[2, 1\], expected int32\[2\]"),
        ({"ancestors": jnp.ones((2, 3), bool)}, r"rows.ancestors is bool\[2, 3\], expected bool_?\[2, 2\]"),
        ({"ancestors": jnp.ones((2, 2), jnp.int8)}, r"rows.ancestors is int8\[2, 2\], expected bool_?\[2, 2\]"),
    ],
)
def test_wrong_rows(model, change, message):
    with pytest.raises(ValueError, match=message):
        run_layers(model.weights, model.state(2), dataclasses.replace(rows_for(2), **change))


@pytest.mark.parametrize("count", [0, MAX_ROWS + 1])
def test_wrong_number_of_rows(model, count):
    with pytest.raises(ValueError, match=f"a step has {count} rows, allowed: 1 to 64; split longer prompts"):
        run_layers(model.weights, model.state(), rows_for(count))


@pytest.mark.parametrize("layers", [(-1, 1), (2, 1), (0, 3)], ids=str)
def test_wrong_layers(model, layers):
    with pytest.raises(ValueError, match=rf"layers is \({layers[0]}, {layers[1]}\), allowed: 0 <= begin <= end <= 2"):
        run_layers(model.weights, model.state(), rows_for(1), layers=layers)


@pytest.mark.parametrize(
    ("stream", "given"),
    [(None, "nothing"), (jnp.zeros((1, 64)), r"float32\[1, 64\]"), (jnp.zeros((1, 128), jnp.bfloat16), "bfloat16")],
    ids=str,
)
def test_wrong_stream(model, stream, given):
    with pytest.raises(ValueError, match=rf"layers from 1 on need stream float32\[1, 128\], got {given}"):
        run_layers(model.weights, model.state(), rows_for(1), layers=(1, 2), stream=stream)


def test_state_of_another_model(model):
    other = init_state(small(sliding_window=40), model.mesh)
    with pytest.raises(
        ValueError, match="made for another model than the weights; make one with init_state of this model"
    ):
        decode_step(model.weights, other, jnp.zeros(1, jnp.int32))


@pytest.mark.parametrize("tokens", [jnp.zeros(2, jnp.int32), jnp.zeros((1, 1), jnp.int32)], ids=str)
def test_wrong_number_of_tokens(model, tokens):
    with pytest.raises(ValueError, match=r"tokens has shape .*, expected \(1,\): one token per sequence"):
        decode_step(model.weights, model.state(), tokens)


def test_vmap_is_refused(model):
    """By the layers and by the head, over tokens, states and streams."""
    sentence = r"fused decode step cannot be vmapped: give the sequences to one state with init_state\(batch=\.\.\.\)"
    state = model.state()
    with pytest.raises(NotImplementedError, match=sentence):
        jax.vmap(lambda t: decode_step(model.weights, state, t)[0].logits)(jnp.zeros((3, 1), jnp.int32))
    many = jax.tree.map(lambda x: jnp.stack([x, x]), state)
    with pytest.raises(NotImplementedError, match=sentence):
        jax.jit(jax.vmap(lambda s: decode_step(model.weights, s, jnp.zeros(1, jnp.int32))[0].logits))(many)
    with pytest.raises(NotImplementedError, match=sentence):
        jax.vmap(lambda x: run_head(model.weights, state, rows_for(1), x).logits)(jnp.zeros((3, 1, 128)))


# Refused by the calls themselves -------------------------------------------------------------------------------------


def wrong(tree, name: str, change):
    return dataclasses.replace(tree, **{name: change(getattr(tree, name))})


def half(x):
    return x[..., : x.shape[-1] // 2]


@pytest.mark.parametrize(
    ("where", "name", "change", "message"),
    [
        ("state", "lengths", lambda x: x.astype(jnp.float32), "position has the wrong element type"),  # made of lengths
        ("state", "rope", half, r"rope has shape \[128, 32\], expected \[128, 64\]"),
        ("state", "rope", lambda x: x[:64], r"k_full has shape \[.*128, 64\], expected \[.*64, 64\]"),
        ("state", "k_full", lambda x: x.astype(jnp.float32), "k_full has the wrong element type"),
        ("state", "v_full", lambda x: x[:, :, :, :, :64], r"v_full has shape \[.*64, 64\], expected \[.*128, 64\]"),
        ("state", "v_ring", lambda x: x[:, :, :, :, :32], "v_ring has shape"),
        ("weights", "embed", lambda x: x.astype(jnp.float16), "embed has the wrong element type"),
        ("weights", "gates", half, r"gates has shape \[2, 4, 64\], expected \[2, 4, 128\]"),
        ("weights", "qkvu", lambda x: x[:, :1], r"qkvu has shape \[1, 1, 16, 8, 256\], expected \[1, 2, 16, 8, 256\]"),
        ("weights", "w13_fp4", lambda x: x.astype(jnp.int8), "w13_fp4 has the wrong element type"),
        ("weights", "w2_fp4", half, r"w2_fp4 has shape \[1, 1, 8, 1, 8, 1, 576\], expected \[1, 1, 8, 1, 8, 1, 1152\]"),
        ("weights", "scale_2", half, r"scale_2 has shape \[2, 8, 1\], expected \[2, 8, 3\]"),
        ("weights", "ranks", lambda x: x.astype(jnp.uint32), "ranks has the wrong element type"),
        ("weights", "lm_head", half, r"decode_head: lm_head has shape .*128\], expected .*256\]"),
        ("weights", "final_gain", half, r"decode_head: gain has shape \[64\], expected \[128\]"),
    ],
)  # fmt: skip
def test_operands_that_do_not_fit(model, monkeypatch, where, name, change, message):
    """Operand, given and expected are named; afterwards everything works as before."""
    monkeypatch.setattr(step_module, "_check", lambda *_: None)
    weights, state = model.weights, model.state()
    if where == "state":
        state = wrong(state, name, change)
    else:
        weights = wrong(weights, name, change)
    with pytest.raises(RuntimeFailure, match=message):
        jax.block_until_ready(jax.jit(decode_step)(weights, state, jnp.zeros(1, jnp.int32)))
    step(model.weights, model.state(), [0])


def test_head_operands_that_do_not_fit(model):
    for stream in (jnp.zeros((2, 128)), jnp.zeros((65, 128)), jnp.zeros((1, 128), jnp.bfloat16), jnp.zeros((1, 256))):
        with pytest.raises(ValueError, match=r"stream is \w+\[\d+, \d+\], expected float32\[1, 128\]: what run_layers"):
            run_head(model.weights, model.state(), rows_for(1), stream)


# Python's own --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("batch", "capacity", "message"),
    [
        (0, 16, r"batch is 0, allowed: 1 to 64 \(a step has at most 64 rows\)"),
        (65, 16, "batch is 65"),
        (1, 0, r"capacity is 0, allowed: 1 to 4096 \(max_position_embeddings\)"),
        (1, 4097, "capacity is 4097, allowed: 1 to 4096"),
    ],
)
def test_wrong_state_sizes(model, batch, capacity, message):
    with pytest.raises(ValueError, match=message):
        init_state(model.config, model.mesh, batch=batch, capacity=capacity)


def test_capacity_is_rounded_up(model):
    assert [init_state(model.config, model.mesh, capacity=n).capacity for n in (1, 16, 17)] == [16, 16, 32]


@pytest.mark.parametrize(
    ("prompts", "chunk", "message"),
    [
        ([[1]], 64, "got 1 prompts for a state of 2 sequences; give one per sequence"),
        ([[1], [2, 64]], 64, r"prompts\[1\]\[1\] is 64, allowed: 0 to 63 \(vocab_size 64\)"),
        ([[-1], [2]], 64, r"prompts\[0\]\[0\] is -1, allowed"),
        ([[1], [2] * 33], 64, r"prompt 1 needs 33 positions, the state holds 32; make it with init_state\(capacity"),
        ([[1], [2]], 0, "chunk is 0, allowed: 1 to 64"),
        ([[1], [2]], 65, "chunk is 65, allowed: 1 to 64"),
    ],
)
def test_wrong_prompts(model, prompts, chunk, message):
    """Refused before the state is consumed."""
    state = model.state(2, 32)
    with pytest.raises(ValueError, match=message):
        prefill(model.weights, state, prompts, chunk=chunk)
    prefill(model.weights, state, [[1], [2]])


def test_whole_prefill_needs_an_empty_state(model):
    sentence = "needs an empty state and a non-empty prompt for every sequence; use prefill"
    with pytest.raises(ValueError, match=sentence):
        prefill_whole(model.config, model.state(2, 32), [[1], []], lambda _: {})
    _, state = prefill(model.weights, model.state(1, 32), [[1]])
    with pytest.raises(ValueError, match=sentence):
        prefill_whole(model.config, state, [[2]], lambda _: {})


@pytest.mark.parametrize(
    ("tokens", "parents", "message"),
    [
        ([], [], "a tree needs 1 to 64 tokens and as many parents, got 0 and 0"),
        ([1] * 65, [-1] * 65, "got 65 and 65"),
        ([1, 2], [-1], "got 2 and 1"),
        ([1, 2], [-1, 1], r"parents\[1\] is 1, allowed: -1 \(a root\) or 0 to 0 \(an earlier node\)"),
        ([1, 2], [-2, 0], r"parents\[0\] is -2, allowed: -1 \(a root\)$"),
    ],
)
def test_wrong_trees(tokens, parents, message):
    with pytest.raises(ValueError, match=message):
        tree_rows(tokens, parents, length=0)


def test_tokens_of_any_integer_type(model):
    """Not a wrong type: any integers will do."""
    want, _ = step(model.weights, model.state(2), [5, 6])
    got, _ = jax.jit(decode_step)(model.weights, model.state(2), np.array([5, 6], np.uint8))
    same(got.logits, want.logits)
