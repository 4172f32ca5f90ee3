"""Wrong values and absent devices: an error in the call that says what is wrong, soon, and the process goes on."""

from __future__ import annotations

import dataclasses
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from decode_helpers import make_model, one_layer, small, step, tapped
from jax.sharding import NamedSharding
from op_helpers import same

from muse_jax.decode import Rows, chain_rows, decode_step, next_rows, run_head, run_layers, tree_rows
from muse_jax.decode import state as state_module
from muse_jax.decode import step as step_module
from muse_jax.decode import weights as weights_module
from muse_jax.mesh import make_mesh

RuntimeFailure = jax.errors.JaxRuntimeError


@pytest.fixture(scope="module")
def model():
    return make_model(small(num_experts_per_tok=3), 17)


# Values that are wrong -----------------------------------------------------------------------------------------------


def rows_of(token, sequence, position, ancestors=None) -> Rows:
    ancestors = np.eye(len(token), dtype=bool) if ancestors is None else np.array(ancestors, bool)
    return Rows(*(jnp.asarray(x, jnp.int32) for x in (token, sequence, position)), jnp.asarray(ancestors))


LOWER = [[1, 0], [1, 1]]
BAD_ROWS = {
    "token too large": (rows_of([64, 1], [0, 1], [3, 5]), r"token\[0\] is 64, allowed: 0 to 63"),
    "token negative": (rows_of([1, -1], [0, 1], [3, 5]), r"token\[1\] is -1, allowed: 0 to 63"),
    "sequence too large": (rows_of([1, 1], [0, 2], [3, 5]), r"sequence\[1\] is 2, allowed: -1 \(inactive\) or 0 to 1"),
    "sequence negative": (rows_of([1, 1], [-2, 1], [3, 5]), r"sequence\[0\] is -2, allowed: -1 \(inactive\) or 0 to 1"),
    "position committed already": (rows_of([1, 1], [0, 1], [2, 5]), r"position\[0\] is 2, allowed: 3 to 66"),
    "position negative": (rows_of([1, 1], [0, 1], [3, -1]), r"position\[1\] is -1, allowed: 5 to 68"),
    "position too deep": (rows_of([1, 1], [0, 1], [67, 5]), r"position\[0\] is 67, allowed: 3 to 66"),
    "position beyond the capacity": (
        rows_of([1, 1], [0, 1], [3, 200]), r"sequence 1 needs position 200, but its cache holds 80 \(capacity\)"),
    "ancestor of another sequence": (
        rows_of([1, 1], [0, 1], [3, 5], LOWER), r"ancestors\[1, 0\] is set, but row 0 belongs to sequence 0, not 1"),
    "inactive ancestor": (
        rows_of([1, 1], [-1, 1], [3, 5], LOWER), r"ancestors\[1, 0\] is set, but row 0 belongs to sequence -1, not 1"),
    "two ancestors at one position": (
        rows_of([1, 1], [0, 0], [3, 3], LOWER), "row 1 at position 3 is not on a path to row 1 at position 3"),
    "descendant as ancestor": (
        rows_of([1, 1], [0, 0], [3, 4], [[1, 1], [1, 1]]), "row 1 at position 4 is not on a path to row 0 at position"),
    "not its own ancestor": (
        rows_of([1, 1], [0, 0], [3, 3], [[1, 0], [1, 0]]), "row 1 must be its own ancestor"),
    "no ancestors": (rows_of([1, 1], [0, 1], [3, 5], np.zeros((2, 2))), "row 0 has no ancestor at position 3"),
    "a gap in the path": (rows_of([1, 1], [0, 0], [3, 5], LOWER), "row 1 has no ancestor at position 4"),
}  # fmt: skip


@pytest.fixture(scope="module")
def two_sequences(model):
    """A state of two sequences of 3 and 5 tokens, and what the next step gives."""
    state = model.state(2, 80)
    rows = chain_rows([1, 2, 3, 4, 5, 6, 7, 8], [0] * 3 + [1] * 5, [0, 1, 2, 0, 1, 2, 3, 4], 8)
    _, state = tapped(model.weights, state, rows, commit=True)
    return state, np.asarray(step(model.weights, state, [9, 10])[0].logits)


@pytest.mark.parametrize("case", BAD_ROWS)
def test_bad_rows(model, two_sequences, case):
    """An error that says what is wrong and allowed; nothing is written, and the next step is as good as ever."""
    rows, message = BAD_ROWS[case]
    state, want = two_sequences
    with pytest.raises(RuntimeFailure, match=f"decode: .*{message}"):
        tapped(model.weights, state, rows)
    same(step(model.weights, state, [9, 10])[0].logits, want)


def test_capacity_exceeded(model):
    """By one token too many, by a draft tree's slots, and by a length that was set wrong."""
    state = model.state(1, 16)
    rows = chain_rows(list(range(16)), [0] * 16, list(range(16)), 16)
    _, state = tapped(model.weights, state, rows, commit=True)
    message = r"sequence 0 needs position 16, but its cache holds 16 \(capacity\); make the state with a larger"
    with pytest.raises(RuntimeFailure, match=message):
        step(model.weights, state, [1])
    shorter = dataclasses.replace(state, lengths=jnp.array([14], jnp.int32))
    with pytest.raises(RuntimeFailure, match=message):  # three siblings, at positions 14 and 15, need slots 14 to 16
        tapped(model.weights, shorter, tree_rows([1, 2, 3], [-1, 0, 0], length=14))
    tapped(model.weights, shorter, tree_rows([1, 2], [-1, 0], length=14))
    for length in (17, -1):
        wrong = dataclasses.replace(state, lengths=jnp.array([length], jnp.int32))
        with pytest.raises(RuntimeFailure, match=rf"lengths\[0\] is {length}, allowed: 0 to 16"):
            step(model.weights, wrong, [1])


def test_error_inside_a_loop_ends_it(model):
    """Soon, with the message, and the process goes on."""

    @jax.jit
    def many(state, tokens):
        return jax.lax.scan(lambda s, t: decode_step(model.weights, s, t[None])[::-1], state, tokens)

    begin = time.monotonic()
    with pytest.raises(RuntimeFailure, match=r"token\[0\] is 64, allowed: 0 to 63"):
        jax.block_until_ready(many(model.state(), jnp.array([1, 2, 64, 3, 4])))
    assert time.monotonic() - begin < 20
    _, outputs = many(model.state(), jnp.array([1, 2, 5, 3, 4]))
    same(np.asarray(outputs.logits)[:, 0], model.oracle([1, 2, 5, 3, 4])["logits"])


def test_error_in_one_of_several_independent_steps(model):
    """The devices that see the error first stop; the others, waiting for them in another state's step, hear of it."""

    @jax.jit
    def both(states, tokens):
        outputs = []
        for state, token in zip(states, tokens, strict=True):
            for _ in range(3):
                output, state = decode_step(model.weights, state, token)
                outputs.append(output.logits)
        return outputs, states

    begin = time.monotonic()
    for _ in range(20):
        with pytest.raises(RuntimeFailure, match=r"token\[0\] is 64, allowed: 0 to 63"):
            jax.block_until_ready(both([model.state() for _ in range(4)], [jnp.array([t]) for t in (1, 64, 3, 4)]))
    assert time.monotonic() - begin < 30
    logits, _ = both([model.state() for _ in range(4)], [jnp.array([t]) for t in (1, 2, 3, 4)])
    same(np.asarray(logits[5])[0], model.oracle([2, 2, 2])["logits"][2])


# Devices that never come ---------------------------------------------------------------------------------------------


def on_four_devices(model):
    """Weights and state of ranks 0 to 3 only, on as many devices: what a wrong mesh would hand to the calls."""
    mesh = make_mesh(4)

    def share(tree, specs):
        out = {}
        for name, spec in specs.items():
            array = np.asarray(getattr(tree, name))
            array = array[:4] if spec == weights_module.RANK else array
            out[name] = jax.device_put(array, NamedSharding(mesh, spec))
        return out

    weights = dataclasses.replace(model.weights, mesh=mesh, **share(model.weights, weights_module.SPECS))
    state = model.state()
    return weights, dataclasses.replace(state, mesh=mesh, **share(state, state_module.SPECS))


def test_missing_devices_are_named(model, monkeypatch):
    weights, state = on_four_devices(model)
    monkeypatch.setattr(step_module, "_check", lambda *_: None)  # which would see at once that ranks are missing
    rows = next_rows(jnp.zeros(1, jnp.int32), jnp.array([5]))
    begin = time.monotonic()
    with pytest.raises(RuntimeFailure, match=r"decode_layers: waited 1\.0* s, but rank\(s\) 4, 5, 6, 7 never joined"):
        jax.block_until_ready(jax.jit(lambda w, s: run_layers(w, s, rows, wait_limit=1.0)[0])(weights, state))
    stream = jnp.zeros((1, model.config.hidden_size), jnp.float32)
    with pytest.raises(RuntimeFailure, match=r"decode_head: waited 1\.0* s, but rank\(s\) 4, 5, 6, 7 never joined"):
        jax.block_until_ready(jax.jit(lambda w, s: run_head(w, s, rows, stream, wait_limit=1.0))(weights, state))
    assert 1.9 < time.monotonic() - begin < 20
    output, _ = step(model.weights, model.state(), [5])
    same(output.logits, model.oracle([5])["logits"])


def test_silent_rank_is_named(model):
    rows = next_rows(jnp.zeros(1, jnp.int32), jnp.array([5]))
    with pytest.raises(RuntimeFailure, match=r"waited 0\.5\d* s, but rank\(s\) 5 never joined"):
        jax.block_until_ready(run_layers(model.weights, model.state(), rows, silent_rank=5, wait_limit=0.5)[0])
    output, _ = step(model.weights, model.state(), [5])
    same(output.logits, model.oracle([5])["logits"])


@pytest.mark.parametrize(
    ("ranks", "message"),
    [((0, 1, 2, 3, 4, 5, 6, 6), r"ranks must be distinct and in 0\.\.7, got 6"), ((0, 1, 2, 3, 4, 5, 6, 8), "got 8")],
)
def test_wrong_ranks(ranks, message):
    model = make_model(one_layer(), 20, 1)
    operand = np.stack([ranks, np.zeros(8)], axis=1).astype(np.int32)
    operand = jax.device_put(operand, model.weights.ranks.sharding)
    weights = dataclasses.replace(model.weights, ranks=operand)
    with pytest.raises(RuntimeFailure, match=message):
        step(weights, model.state(), [1])
    step(model.weights, model.state(), [1])
