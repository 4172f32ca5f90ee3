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
    decode_step,
    init_state,
    next_rows,
    run_head,
)
from muse_jax.decode import step as step_module

RuntimeFailure = jax.errors.JaxRuntimeError


@pytest.fixture(scope="module")
def model():
    return make_model(small(), 23)


def rows_for(count: int):
    return next_rows(jnp.zeros(count, jnp.int32), jnp.zeros(count, jnp.int32))


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
        ("weights", "lm_head", half, r"decode_layers: lm_head has shape .*128\], expected .*256\]"),
        ("weights", "final_gain", half, r"decode_layers: gain has shape \[64\], expected \[128\]"),
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


# Python's own --------------------------------------------------------------------------------------------------------


def test_capacity_is_rounded_up(model):
    assert [init_state(model.config, model.mesh, capacity=n).capacity for n in (1, 16, 17)] == [16, 16, 32]


def test_tokens_of_any_integer_type(model):
    """Not a wrong type: any integers will do."""
    want, _ = step(model.weights, model.state(2), [5, 6])
    got, _ = jax.jit(decode_step)(model.weights, model.state(2), np.array([5, 6], np.uint8))
    same(got.logits, want.logits)
