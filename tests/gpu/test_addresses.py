"""Recorded graphs and buffers that move: states rebuilt elsewhere, garbage where they lay, several models at once."""

import gpu_helpers as helpers
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from muse_jax import decode
from muse_jax.mesh import rank_sharding

STEPS, CAPACITY = 12, 96


@pytest.fixture
def models(gpus):
    """Two models of one shape with other weights, so that a stale address gives plausible but wrong bits."""
    config = helpers.small_config()
    arrays = [helpers.random_arrays(config, seed) for seed in (1, 2)]
    yield from helpers.beside_the_cpu([config] * 2, arrays, gpus, STEPS, CAPACITY)


def address(array) -> int:
    return array.addressable_shards[0].data.unsafe_buffer_pointer()


def garbage(weights):
    """Arrays like the caches of a state, full of NaN: they take the places that are free."""
    like = jax.eval_shape(lambda: decode.init_state(weights.config, weights.mesh, capacity=CAPACITY))
    return [
        jax.device_put(np.full(x.shape, 0xFFFF, np.uint16).view(x.dtype), rank_sharding(weights.mesh))
        for x in (getattr(like, name) for name in helpers.CACHES)
    ]


@pytest.mark.parametrize("donate", [True, False])
def test_a_loop_over_rebuilt_states(models, donate, same_bytes):
    """One graph per model, replayed over six states each at changing addresses."""
    on_gpus, expected = models
    run = jax.jit(helpers.until, donate_argnames=("state",) if donate else (), compiler_options=decode.GRAPH_OPTIONS)
    end = 3 + STEPS
    held, seen = [], [set(), set()]
    for turn in range(6):
        for which, weights in enumerate(on_gpus):
            output, state = helpers.start(weights, capacity=CAPACITY)
            seen[which].add(address(state.k_full))
            after, token = run(weights, state, output.token, end)
            same_bytes([token, *helpers.caches(after)], [expected[which][0][-1], *expected[which][1:]])
            del output, state, after, token
            # After every other turn the places of the last states are taken, then they are free again.
            held = [*held, garbage(weights)] if turn % 2 else []
    assert min(map(len, seen)) > 1, "no state ever moved: nothing was tested"


@pytest.mark.parametrize("donate", [True, False])
def test_steps_between_allocations(models, donate, same_bytes):
    """Single steps of both models in turn; states move every fourth step, another program's graph evicts theirs."""
    on_gpus, expected = models
    step = jax.jit(
        decode.decode_step, donate_argnames=("state",) if donate else (), compiler_options=decode.GRAPH_OPTIONS
    )
    begun = [helpers.start(weights, capacity=CAPACITY) for weights in on_gpus]
    states, tokens = [state for _, state in begun], [[output.token] for output, _ in begun]
    seen, held = [set(), set()], []
    for i in range(STEPS):
        for which, weights in enumerate(on_gpus):
            seen[which].add(address(states[which].k_full))
            output, states[which] = step(weights, states[which], tokens[which][-1])
            tokens[which].append(output.token)
        if i % 4 == 2:
            states = [jax.tree.map(jnp.copy, state) for state in states]
            held.append([garbage(weights) for weights in on_gpus])  # where the states were
        if i == STEPS // 2:
            other = jax.jit(
                lambda x: jax.lax.fori_loop(0, 3, lambda _, y: y * 2, x), compiler_options=decode.GRAPH_OPTIONS
            )
            assert other(jnp.ones(3))[0] == 8
    for which in range(2):
        same_bytes([jnp.stack(tokens[which][1:]), *helpers.caches(states[which])], expected[which])
    assert min(map(len, seen)) > 1, "no state ever moved: nothing was tested"


def test_after_a_rebuilt_communicator(models, same_bytes):
    """Programs are compiled again for the new workspaces; graphs over the old ones are not replayed."""
    (weights, _), (expected, _) = models
    run = jax.jit(helpers.until, compiler_options=decode.GRAPH_OPTIONS)
    for turn in range(3):
        for _ in range(3):
            output, state = helpers.start(weights, capacity=CAPACITY)
            after, token = run(weights, state, output.token, 3 + STEPS)
            same_bytes([token, *helpers.caches(after)], [expected[0][-1], *expected[1:]])
        if turn < 2:
            weights.communicator.rebuild()
