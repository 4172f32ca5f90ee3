"""Steps that cannot finish: the step's own output says so, later calls raise or say so, a rebuilt communicator works.

A CUDA handler has returned long before its kernel gives up, so the failed step itself cannot raise
(docs/architecture.md, "Inside a GPU program").
"""

import time

import gpu_helpers as helpers
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from muse_jax import decode

LIMIT = 0.5
EARLIER = "an earlier step failed"
CONFIG = helpers.small_config()
ARRAYS = helpers.random_arrays(CONFIG, 0)


@pytest.fixture
def weights(gpus):
    return helpers.placed(CONFIG, ARRAYS, gpus)


def failing(weights, state, token):
    """A step that rank 5 takes no part in."""
    rows = decode.next_rows(state.lengths, token)
    stream, state, _ = decode.run_layers(weights, state, rows, silent_rank=5, wait_limit=LIMIT)
    return stream, decode.run_head(weights, state, rows, stream, wait_limit=LIMIT), state


def assert_says_so(output):
    """What an unfinished step gives: NaN logits, `nan` set, token -1. The head's handler raises if it comes later."""
    try:
        logits, nan, token = (np.asarray(x) for x in (output.logits, output.nan, output.token))
    except jax.errors.JaxRuntimeError as error:
        assert EARLIER in str(error)
        return
    assert np.isnan(logits).all() and nan.all() and (token == -1).all()


def test_silent_rank_is_reported(weights, same_bytes):
    """Soon, by the step's output and by the communicator; the process lives, and a rebuilt communicator works."""
    output, state = helpers.start(weights)
    begin = time.monotonic()
    output = jax.jit(failing)(weights, state, output.token)[1]
    assert_says_so(output)
    assert time.monotonic() - begin < 30
    with pytest.raises(RuntimeError, match=r"rank \d waited in layer 0, [\w -]+, for rank 5"):
        weights.communicator.check()
    with pytest.raises(Exception, match=EARLIER):
        helpers.start(weights)
    weights.communicator.rebuild()
    found, expected = (
        helpers.greedy(w, (begun := helpers.start(w))[1], begun[0].token, 8)
        for w in (weights, helpers.placed(CONFIG, ARRAYS, jax.devices("cpu")[:1]))
    )
    same_bytes([found[0], *helpers.caches(found[1])], [expected[0], *helpers.caches(expected[1])])


def test_recorded_graphs_after_a_failure(weights):
    """A replayed graph calls no handler, so nothing can raise: its steps say so in their output, each of them soon."""
    step = jax.jit(decode.decode_step, donate_argnames=("state",), compiler_options=decode.GRAPH_OPTIONS)
    run = jax.jit(helpers.until, donate_argnames=("state",), compiler_options=decode.GRAPH_OPTIONS)
    output, state = helpers.start(weights, capacity=512)
    for _ in range(6):
        output, state = step(weights, state, output.token)
    other, loop_state = helpers.start(weights, capacity=512)
    for end in (40, 80, 120):
        loop_state, loop_token = run(weights, loop_state, other.token, end)
    jax.block_until_ready((output, loop_state))

    broken, broken_state = helpers.start(weights)
    assert_says_so(jax.jit(failing)(weights, broken_state, broken.token)[1])
    begin = time.monotonic()
    for _ in range(6):
        try:
            output, state = step(weights, state, output.token)
            assert_says_so(output)
        except jax.errors.JaxRuntimeError as error:
            assert EARLIER in str(error)
            break
    try:
        loop_state, loop_token = run(weights, loop_state, loop_token, 400)
        assert np.asarray(loop_token).tolist() == [-1]
    except jax.errors.JaxRuntimeError as error:
        assert EARLIER in str(error)
    assert time.monotonic() - begin < 30
    with pytest.raises(RuntimeError, match="for rank 5"):
        weights.communicator.check()
    weights.communicator.rebuild()


def test_bad_rows_are_reported(weights):
    rows = decode.next_rows(jnp.zeros(2, jnp.int32), jnp.array([5, 9999]))
    state = decode.init_state(CONFIG, weights.mesh, batch=2, capacity=64)
    stream, state, _ = jax.jit(decode.run_layers)(weights, state, rows)
    assert_says_so(decode.run_head(weights, state, rows, stream))
    with pytest.raises(RuntimeError, match="row 1 of the step has a token"):
        weights.communicator.check()
    weights.communicator.rebuild()


def test_closed_communicator(weights, same_bytes):
    """Nothing runs on freed workspaces, not even a program compiled before; a rebuilt communicator works."""
    state = decode.init_state(CONFIG, weights.mesh, capacity=64)
    rows = decode.next_rows(state.lengths, jnp.array([1]))
    run = jax.jit(decode.run_layers)
    compiled = run.lower(weights, state, rows).compile()
    expected = run(weights, state, rows)[0]
    weights.communicator.close()
    with pytest.raises(ValueError, match=r"was closed; rebuild\(\) it"):
        run(weights, state, rows)
    with pytest.raises(TypeError):
        compiled(weights, state, rows)
    weights.communicator.rebuild()
    same_bytes(run(weights, state, rows)[0], expected)
