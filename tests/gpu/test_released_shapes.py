"""The fused step at the released layer shapes (hidden 8192, 128/16 heads, 256 experts of 4096, vocabulary 202048).

One full and one sliding layer, few rows, long contexts, against the CPU byte for byte. Weights and caches repeat small
random pools: either side fills its 22 GB in seconds, where generating them on the host or copying them takes minutes.
"""

import dataclasses
import functools
import math

import gpu_helpers as helpers
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax.sharding import NamedSharding

from muse_jax import MuseSparkConfig, decode, make_mesh
from muse_jax.comm import Communicator
from muse_jax.decode import state as state_module
from muse_jax.decode import weights as weights_module
from muse_jax.mesh import ranks_array

BF16 = ml_dtypes.bfloat16
CAPACITY, LENGTHS = 2560, (2500, 70)  # beyond the window, and within it


def released_slice() -> MuseSparkConfig:
    """The released model cut to two layers, one of each kind, NVFP4 experts in both."""
    full = MuseSparkConfig.released()
    chosen = [full.layer_types.index(kind, 1) for kind in ("full_attention", "sliding_attention")]
    return full.replace(
        num_hidden_layers=2, layer_types=tuple(full.layer_types[i] for i in chosen),
        layer_rope_theta=tuple(full.layer_rope_theta[i] for i in chosen), expert_formats=("nvfp4",) * 2,
    )  # fmt: skip


def pool(seed, dtype, mean=0.0, std=1.0):
    """Random values whose number divides no row, so that every row of an array differs from its neighbours."""
    rng = np.random.default_rng(seed)
    if dtype == np.uint8:
        # NVFP4 panels, in which the pool does not know the scales' places: every byte is one of 0.25 to 0.9375.
        return rng.integers(0x28, 0x38, 4_194_301, np.uint8)
    return (rng.standard_normal(1_048_573, np.float32) * np.float32(std) + np.float32(mean)).astype(dtype)


def starts(shape, count) -> np.ndarray:
    """Where in the pool each stretch of up to 2^20 elements of an array begins, by its leading dimensions."""
    lead = next(d for d in range(len(shape) + 1) if math.prod(shape[d:]) <= 1 << 20)
    width = math.prod(shape[lead:])
    return (np.arange(math.prod(shape[:lead])) * width % count).astype(np.int32).reshape(shape[:lead])


def aligned_zeros(shape, dtype) -> np.ndarray:
    """Aligned as XLA wants it, so that JAX takes the memory as it is; memory that nobody touches is never there."""
    size = math.prod(shape) * np.dtype(dtype).itemsize
    raw = np.zeros(size + 64, np.uint8)
    return raw[-raw.ctypes.data % 64 :][:size].view(dtype).reshape(shape)


def on_host(shape, values) -> np.ndarray:
    array = aligned_zeros(shape, values.dtype)
    if values.any():
        begin = starts(shape, len(values))
        rows = array.reshape(begin.size, -1)
        longer = np.resize(values, len(values) + rows.shape[1])
        for row, first in zip(rows, begin.ravel(), strict=True):
            row[:] = longer[first : first + len(row)]
    return array


def on_device(shape, values, sharding) -> jax.Array:
    if not values.any():
        return jnp.zeros(shape, values.dtype, device=sharding)
    begin = starts(shape, len(values))
    tail = shape[begin.ndim :]
    unsigned = {1: np.uint8, 2: np.uint16, 4: np.uint32}[values.dtype.itemsize]  # bits, or XLA converts small floats

    @functools.partial(jax.jit, out_shardings=sharding)
    def fill(bits, begin):
        offset = jnp.arange(math.prod(tail), dtype=jnp.int32).reshape(tail)
        at = (begin.reshape(*begin.shape, *[1] * len(tail)) + offset) % len(values)
        return jax.lax.bitcast_convert_type(bits[at], values.dtype)

    return fill(values.view(unsigned), begin)


def filled(mesh, spec, shape, values) -> jax.Array:
    sharding = NamedSharding(mesh, spec)
    if next(iter(mesh.devices.flat)).platform == "cpu":
        return jax.device_put(on_host(shape, values), sharding)
    return on_device(shape, values, sharding)


def weights_on(mesh, config) -> decode.DecodeWeights:
    c, layers = config, config.num_hidden_layers
    h, m, i, e = c.hidden_size, c.moe_hidden_size, c.moe_intermediate_size, c.num_local_experts
    q, kv, v = c.attention_size // 8, c.num_key_value_heads * 8, c.vocab_size // 8
    w13, w2 = (2 * i // 8 // 16, m // 16), (m // 8 // 16, i // 16)
    shapes = {
        "embed": ((8, v, h), pool(1, BF16)),
        "hidden_gains": ((layers, 3, h), pool(2, BF16, 1, 0.2)), "moe_gains": ((layers, 2, m), pool(3, BF16, 1, 0.2)),
        "final_gain": ((h,), pool(4, BF16, 1, 0.2)),
        "qkvu": ((8, layers, (2 * q + 2 * kv) // 16, h // 16, 256), pool(5, BF16, 0, h**-0.5)),
        "o": ((8, layers, h // 16, q // 16, 256), pool(6, BF16, 0, (8 * q) ** -0.5)),
        "router": ((8, layers, e // 8, h), pool(7, np.float32, 0, 0.1)),
        "router_bias": ((layers, e), pool(8, np.float32, 0, 0.1)),
        "pre_expert": ((8, layers, m // 8 // 16, h // 16, 256), pool(9, BF16, 0, h**-0.5)),
        "post_expert": ((8, layers, h // 16, m // 8 // 16, 256), pool(10, BF16, 0, m**-0.5)),
        "w13_bf16": ((8, 1, e, *w13, 256), np.zeros(1, BF16)),  # unused, but there
        "w2_bf16": ((8, 1, e, *w2, 256), np.zeros(1, BF16)),
        "w13_fp4": ((8, layers, e, w13[0], 8, m // 1024, 1152), pool(11, np.uint8)),
        "w2_fp4": ((8, layers, e, w2[0], 8, i // 1024, 1152), pool(12, np.uint8)),
        "scale_2": ((layers, e, 3), pool(15, np.float32, 1 / 64, 1 / 512)),
        "input_scales": ((layers, 2), pool(16, np.float32, 1 / 64, 1 / 512)),
        "lm_head": ((8, -(-v // 16), h // 16, 256), pool(17, BF16, 0, 0.5 * h**-0.5)),
    }  # fmt: skip
    arrays = {name: filled(mesh, weights_module.SPECS[name], *made) for name, made in shapes.items()}
    beta = np.random.default_rng(0).uniform(0.1, 0.3, (layers, 2, h)).astype(np.float32)
    gates = np.stack([np.sqrt(1 - beta * beta), beta], axis=2).reshape(layers, 4, h)
    arrays["gates"] = jax.device_put(gates, NamedSharding(mesh, weights_module.SPECS["gates"]))
    return decode.DecodeWeights(
        **arrays, ranks=ranks_array(mesh, 1), config=config, mesh=mesh, communicator=Communicator(config, mesh)
    )


def state_on(mesh, config) -> decode.DecodeState:
    """Two sequences of LENGTHS tokens whose keys and values are random."""
    state = decode.init_state(config, mesh, batch=2, capacity=CAPACITY)
    caches = {
        name: filled(mesh, state_module.SPECS[name], getattr(state, name).shape, pool(20 + i, BF16))
        for i, name in enumerate(helpers.CACHES)
    }
    lengths = jax.device_put(np.array(LENGTHS, np.int32), state.lengths.sharding)
    return dataclasses.replace(state, **caches, lengths=lengths)


def work(mesh, config) -> list[np.ndarray]:
    """A token for both sequences, 20 rows of two chains, two trees: every output, every tap, the caches."""
    rng = np.random.default_rng(0)
    weights, state = weights_on(mesh, config), state_on(mesh, config)
    output, state = helpers.single_step(weights, state, jnp.array([5, config.vocab_size - 1], jnp.int32))
    lengths = np.array(LENGTHS) + 1
    chains = [(b, lengths[b] + i) for b, count in enumerate((3, 17)) for i in range(count)]
    tokens = rng.integers(0, config.vocab_size, len(chains)).tolist()
    rows = decode.chain_rows(tokens, *(list(column) for column in zip(*chains, strict=True)), len(chains))
    commit = np.array([3, 17], np.int32)
    first, state = helpers.tapped_step(weights, state, rows, commit)
    rows = helpers.random_trees(rng, config.vocab_size, lengths + commit, len(chains))
    second, state = helpers.tapped_step(weights, state, rows, np.zeros(2, np.int32))
    found = [np.asarray(x) for x in jax.tree.leaves((output, first, second))]
    weights.communicator.check()
    weights.communicator.close()
    return [*found, *helpers.caches(state)]


@functools.cache
def expected():
    return work(make_mesh(jax.devices("cpu")[:1]), released_slice())


def test_released_slice(gpus, same_bytes):
    found = work(make_mesh(gpus), released_slice())
    assert np.isfinite(found[0]).all() and found[0].std() > 0.01  # the first step's logits
    same_bytes(found, expected())
