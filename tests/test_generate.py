"""Greedy generation: the compiled loop is step-by-step argmax, for every sequence on its own terms."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
from decode_helpers import FULL, SLIDING, drawn, small, step
from oracle import model as oracle

from muse_jax.generate import generate
from muse_jax.kept import FINISH_REASONS
from muse_jax.language_model import LanguageModel
from muse_jax.mesh import make_mesh
from muse_jax.weights import random_params

LIMIT = 96  # max_position_embeddings
PROMPTS = [[5], [9, 8, 7, 6, 5, 4, 3, 2, 1], [33, 20, 61], [1, 2, 3, 4, 5, 6]]


def language_model(config, seed: int, devices: int = 8, change=None) -> LanguageModel:
    mesh = make_mesh(devices)
    params = random_params(config, seed, mesh, quantized=True)
    if change is not None:
        params = params | change(params)
    return LanguageModel(config, params, mesh)


@pytest.fixture(scope="module")
def model():
    return language_model(small(max_position_embeddings=LIMIT), 41)


@pytest.fixture(scope="module")
def choices(model):
    """30 greedy tokens after each prompt, one decode step at a time."""
    return [by_steps(model, prompt, 30) for prompt in PROMPTS]


def by_steps(model, prompt: list[int], count: int) -> list[int]:
    """Argmax of one step after the other, the prompt's tokens included."""
    state, out = model.init_state(capacity=LIMIT), []
    for token in prompt:
        output, state = step(model.weights, state, [token])
    for _ in range(count):
        out.append(int(oracle.argmax(np.asarray(output.logits))[0]))
        output, state = step(model.weights, state, out[-1:])
    return out


# Tokens --------------------------------------------------------------------------------------------------------------


def test_greedy_is_step_by_step_argmax(model, choices):
    for prompt, want in zip(PROMPTS, choices, strict=True):
        made = generate(model, prompt, max_new_tokens=30, stop_ids=())
        assert made.tokens == [want]
        assert made.finish_reasons == ["length"] and made.steps == 29


def test_a_batch_of_different_lengths_is_single_runs(model, choices):
    made = generate(model, PROMPTS, max_new_tokens=30, stop_ids=())
    assert made.tokens == choices
    assert made.finish_reasons == ["length"] * 4 and made.steps == 29
    order = [2, 0, 3, 1]
    assert generate(model, [PROMPTS[b] for b in order], max_new_tokens=30, stop_ids=()).tokens == [
        choices[b] for b in order
    ]


def test_tokens_are_the_oracles():
    """A short continuation, every choice checked by the NumPy oracle on the whole text."""
    model = language_model(small(layer_types=(FULL, SLIDING), sliding_window=2), 42)
    (made,) = generate(model, [3, 50, 12], max_new_tokens=8, stop_ids=()).tokens
    params = {name: np.asarray(a) for name, a in model.params.items()}
    logits = oracle.forward(model.config, params, [3, 50, 12, *made])["logits"]
    assert made == oracle.argmax(logits[2:-1]).tolist()


@pytest.mark.parametrize("seed", [51])
def test_random_models_on_any_mesh(seed):
    rng = np.random.default_rng(seed)
    config = drawn(seed)
    prompts = [rng.integers(0, config.vocab_size, n).tolist() for n in rng.integers(1, 20, 3)]
    models = [language_model(config, seed, devices) for devices in (8, 2)]
    made = [generate(model, prompts, max_new_tokens=10, stop_ids=()).tokens for model in models]
    assert made[0] == made[1] == [by_steps(models[0], prompt, 10) for prompt in prompts]


def test_prompts_of_any_integers(model, choices):
    want = choices[1][:4]
    assert generate(model, np.array(PROMPTS[1]), max_new_tokens=4, stop_ids=()).tokens == [want]
    assert generate(model, tuple(PROMPTS[1]), max_new_tokens=4, stop_ids=()).tokens == [want]
    assert generate(model, [np.array(PROMPTS[1], np.uint16)], max_new_tokens=4, stop_ids=()).tokens == [want]
    assert generate(model, np.array([PROMPTS[1]] * 2), max_new_tokens=4, stop_ids=()).tokens == [want] * 2


# Ends ----------------------------------------------------------------------------------------------------------------


def until(tokens: list[int], stops) -> list[int]:
    """Up to the first stop id, that one included."""
    at = next((i for i, t in enumerate(tokens) if t in stops), len(tokens) - 1)
    return tokens[: at + 1]


def test_stop_ids(model, choices):
    """Each sequence ends at its own first stop id; the others go on with the same tokens."""
    stops = [choices[0][3], choices[1][7], choices[3][0]]
    made = generate(model, PROMPTS, max_new_tokens=30, stop_ids=stops)
    want = [until(tokens, stops) for tokens in choices]
    assert made.tokens == want
    assert made.finish_reasons == ["stop" if t[-1] in stops else "length" for t in want]
    assert made.finish_reasons[0] == made.finish_reasons[1] == made.finish_reasons[3] == "stop"
    assert len(want[3]) == 1  # by the prefill's own token
    assert made.steps == max(map(len, want)) - 1


def test_all_stop_at_once_ends_the_loop(model, choices):
    made = generate(model, PROMPTS[0], max_new_tokens=30, stop_ids=[choices[0][0]])
    assert made.tokens == [choices[0][:1]] and made.finish_reasons == ["stop"] and made.steps == 0


def test_stop_id_at_the_last_token(model, choices):
    count = next(n for n in range(2, 30) if choices[2][n - 1] not in choices[2][: n - 1])
    made = generate(model, PROMPTS[2], max_new_tokens=count, stop_ids=[choices[2][count - 1]])
    assert made.tokens == [choices[2][:count]] and made.finish_reasons == ["stop"]


def test_stop_ids_default_to_the_configuration(model, choices):
    stop = choices[1][5]
    config = model.config.replace(eos_token_ids=(stop,))
    stopping = LanguageModel(config, model.params, model.mesh)
    made = generate(stopping, PROMPTS[1], max_new_tokens=30)
    assert made.tokens == [until(choices[1], [stop])] and made.finish_reasons == ["stop"]
    assert generate(stopping, PROMPTS[1], max_new_tokens=30, stop_ids=()).tokens == [choices[1]]


def test_one_new_token(model, choices):
    """The prefill alone decides."""
    made = generate(model, PROMPTS, max_new_tokens=1, stop_ids=())
    assert made.tokens == [c[:1] for c in choices]
    assert made.finish_reasons == ["length"] * 4 and made.steps == 0


def test_up_to_the_last_position(model):
    prompt = np.random.default_rng(3).integers(0, 64, LIMIT - 3).tolist()
    made = generate(model, prompt, max_new_tokens=3, stop_ids=())
    assert made.tokens == [by_steps(model, prompt, 3)]
    assert made.finish_reasons == ["length"]


def test_nan_ends_a_sequence(model, choices):
    """In the prompt, and later where a generated token's embedding is NaN; neighbours keep their bits."""
    late = next(t for t in choices[0][2:20] if t not in choices[1] and all(t not in p for p in PROMPTS))

    def spoil(params):
        table = np.array(params["embed_tokens.weight"])
        table.view(np.uint16)[[late, 63], 3] = 0x7FC0
        return {"embed_tokens.weight": jnp.asarray(table)}

    broken = language_model(model.config, 41, change=spoil)
    made = generate(broken, [*PROMPTS[:2], [1, 63, 2]], max_new_tokens=30, stop_ids=())
    kept = choices[0][: choices[0].index(late) + 1]  # the token itself is a good choice, what follows it is not
    assert made.tokens[0] == kept and made.finish_reasons[0] == "nan"
    assert made.tokens[1] == choices[1] and made.finish_reasons[1] == "length"
    assert made.tokens[2] == [] and made.finish_reasons[2] == "nan"
    assert {*made.finish_reasons} <= {*FINISH_REASONS}
