"""Attention over caches of every length: all the ways in which a layer's positions are cut into units
(ffi/decode/cuda/attention_schedule.cuh)."""

import dataclasses

import gpu_helpers as helpers
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from muse_jax import decode

CONFIG = helpers.small_config(sliding_window=300, max_position_embeddings=1 << 20)
ARRAYS = helpers.random_arrays(CONFIG, 0)


def filled(weights, lengths, size):
    """A state of so many committed positions, of random keys and values; the same on every backend."""
    state = decode.init_state(CONFIG, weights.mesh, batch=len(lengths), capacity=max(lengths) + size)

    def draw(name, index):
        like = getattr(state, name)

        def make(key):  # bits are the same everywhere, normal numbers are not: magnitudes from 2^-7 to 2
            bits = jax.random.bits(key, like.shape, jnp.uint16)
            return jax.lax.bitcast_convert_type(bits & 0x807F | (120 + (bits >> 7) % 8 << 7), jnp.bfloat16)

        return jax.jit(make, out_shardings=like.sharding)(jax.random.key(index))

    caches = {name: draw(name, index) for index, name in enumerate(helpers.CACHES)}
    return dataclasses.replace(state, **caches, lengths=jax.device_put(np.int32(lengths), state.lengths.sharding))


@pytest.mark.parametrize(
    ("lengths", "size"),
    [((700,), 1), ((2047, 130, 5000), 33), ((1, 127, 128, 129, 255), 64), ((4096, 2000), 16), ((33_000,), 24)],
    ids=str,
)
def test_random_caches(gpus, lengths, size, same_bytes):
    """Several sequences, trees; sums of chunks and of stretches, groups of one to eight rows."""
    results = []
    for devices in (gpus, jax.devices("cpu")[:1]):
        weights = helpers.placed(CONFIG, ARRAYS, devices)
        state = filled(weights, lengths, size)
        rows = helpers.random_trees(np.random.default_rng(size), CONFIG.vocab_size, np.array(lengths), size)
        values, state = helpers.tapped_step(weights, state, rows, jnp.zeros(len(lengths), jnp.int32))
        results.append([*map(np.asarray, jax.tree.leaves(values)), *helpers.caches(state)])
        weights.communicator.check()
        weights.communicator.close()
    same_bytes(*results)


def test_more_sums_than_the_scratch_holds(gpu, same_bytes):
    """64 rows at 600,000 positions, where a unit is all of a row's positions, against a row alone, by stretches."""
    weights, length = helpers.placed(CONFIG, ARRAYS, [gpu]), 600_000
    state = filled(weights, (length,), 64)
    tokens = np.random.default_rng(0).integers(0, CONFIG.vocab_size, 64).tolist()

    def logits(own):
        nonlocal state
        rows = decode.tree_rows(own, [-1] * len(own), length=length)
        (output, _, _), state = helpers.tapped_step(weights, state, rows, jnp.zeros(1, jnp.int32))
        return np.asarray(output.logits)

    together = logits(tokens)
    for i in (0, 1, 30, 63):
        same_bytes(together[i], logits(tokens[i : i + 1])[0])
    weights.communicator.check()
    weights.communicator.close()
