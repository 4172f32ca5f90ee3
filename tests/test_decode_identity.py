"""Whose state, whose weights: what is consumed, foreign or of the wrong type is refused."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from decode_helpers import FULL, make_model, one_layer, small

from muse_jax import LanguageModel, decode, generate, make_mesh
from muse_jax.weights import random_params


@pytest.fixture(scope="module")
def model():
    config, mesh = small(), make_mesh(8)
    return LanguageModel(config, random_params(config, 3, mesh), mesh)


def test_two_sets_of_weights_on_one_state():
    """One program steps the same state with two models of one shape."""
    first, second = (make_model(one_layer(FULL), seed) for seed in (1, 2))
    _, state = decode.prefill(first.weights, first.state(1, 16), [[1, 2]])
    token = jnp.array([3], jnp.int32)
    weights = (first.weights, second.weights)
    alone = [np.asarray(jax.jit(decode.decode_step)(w, state, token)[0].logits) for w in weights]
    both = jax.jit(lambda weights, state, token: [decode.decode_step(w, state, token)[0].logits for w in weights])
    for _ in range(60):
        found = [np.asarray(x) for x in both(weights, state, token)]
        assert all(a.tobytes() == b.tobytes() for a, b in zip(found, alone, strict=True))


def test_a_consumed_state_is_refused(model):
    """jaxlib itself would end the process here on several devices."""
    output, state = model.prefill(model.init_state(capacity=32), [1, 2, 3])
    _, after = model.decode_step(state, output.token)
    for use in (
        lambda: model.decode_step(state, output.token),
        lambda: model.prefill(state, [1]),
        lambda: model.prefill_whole(state, [1]),
    ):
        with pytest.raises(ValueError, match="consumed by an earlier step; use the state that the step returned"):
            use()
    model.decode_step(after, output.token)


def test_a_foreign_state_is_refused(model):
    other_theta = model.config.replace(layer_rope_theta=tuple(7.0 * t for t in model.config.layer_rope_theta))
    for config, mesh, what in ((other_theta, model.mesh, "model"), (model.config, make_mesh(2), "mesh")):
        state = decode.init_state(config, mesh, capacity=32)
        with pytest.raises(ValueError, match=f"made for another {what} than the weights"):
            model.decode_step(state, [1])
    with pytest.raises(TypeError, match="state is a NoneType"):
        model.decode_step(None, [1])


@pytest.mark.parametrize(
    ("tokens", "active", "message"),
    [
        (np.array([2**32 + 5]), None, "tokens holds 4294967301, allowed: 0 to"),
        ([-1], None, "tokens holds -1, allowed: 0 to"),
        (jnp.array([1.7]), None, "tokens has dtype float32, expected integers"),
        ([1, 2], None, "one token per sequence"),
        ([1], jnp.array([2]), r"active is int32\[1\], expected bool\[1\]"),
        ([1], jnp.array([True, False]), r"active is bool\[2\], expected bool\[1\]"),
    ],
)
def test_wrong_tokens_are_refused(model, tokens, active, message):
    with pytest.raises((TypeError, ValueError), match=message):
        model.decode_step(model.init_state(capacity=32), tokens, active)


@pytest.mark.parametrize(
    "prompt", [[1.5, 2.0], "abc", None, [[1], 2], [[[1]]], 5, [[1.0, 2]], [], [[]], [-1], [10**6]], ids=repr
)
def test_wrong_prompts_are_refused(model, prompt):
    with pytest.raises((TypeError, ValueError), match=r"expected token ids|is empty|allowed: 0 to"):
        generate(model, prompt, max_new_tokens=2)


def test_prompts_may_be_arrays(model):
    expected = generate(model, [[1, 2], [3, 4]], max_new_tokens=3).tokens
    for prompts in (np.array([[1, 2], [3, 4]]), jnp.array([[1, 2], [3, 4]]), [np.array([1, 2]), jnp.array([3, 4])]):
        assert generate(model, prompts, max_new_tokens=3).tokens == expected
    assert generate(model, jnp.array([1, 2]), max_new_tokens=3).tokens == expected[:1]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_new_tokens": 2.5}, "max_new_tokens is 2.5, allowed: whole numbers"),
        ({"stop_ids": [5.5]}, "stop id 5.5 is not a token"),
    ],
)
def test_wrong_options_are_refused(model, options, message):
    with pytest.raises(ValueError, match=message):
        generate(model, [1], **options)


def test_wrong_sizes_are_refused(model):
    for options, message in (({"capacity": 32.0}, "capacity is 32.0"), ({"batch": "1"}, "batch is '1'")):
        with pytest.raises(TypeError, match=message):
            model.init_state(**options)
    for devices in ("8", True, 1.5, ["cpu"]):
        with pytest.raises(TypeError, match="devices: given"):
            make_mesh(devices)
