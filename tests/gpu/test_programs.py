"""Steps beside other work: XLA's collectives in the same program, two models in flight, several threads.

The rules are in docs/architecture.md, "Inside a GPU program".
"""

import itertools
import threading

import gpu_helpers as helpers
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from muse_jax import decode
from muse_jax.mesh import AXIS


@pytest.fixture
def two_gpus():
    if len(jax.devices("gpu")) < 2:
        pytest.skip("needs two GPUs")
    return jax.devices("gpu")[:2]


# Collectives ---------------------------------------------------------------------------------------------------------


def summed(mesh, x):
    """int32 [D, n], one row per device -> their sum, by an all-reduce."""
    return jax.shard_map(lambda x: lax.psum(x[0], AXIS), mesh=mesh, in_specs=P(AXIS), out_specs=P(), check_vma=False)(x)


def gathered(mesh, logits):
    """Logits [T, V], sharded over V -> their bits on every device, by an all-gather."""

    def local(x):
        return lax.all_gather(lax.bitcast_convert_type(x, jnp.int32), AXIS, axis=1, tiled=True)

    return jax.shard_map(local, mesh=mesh, in_specs=P(None, AXIS), out_specs=P(), check_vma=False)(logits)


def by_data(weights, state, token, numbers):
    """The step reads what an all-reduce brought, and an all-gather reads the step's logits."""

    def body(carry, _):
        state, token, numbers = carry
        shift = summed(weights.mesh, numbers).sum() % 7
        output, state = decode.decode_step(weights, state, (token + shift) % weights.config.vocab_size)
        bits = gathered(weights.mesh, output.logits).sum()
        return (state, output.token, numbers + bits), (output.token, bits, shift)

    return lax.scan(body, (state, token, numbers), None, length=200)


def by_barrier(weights, state, token, numbers):
    """An all-reduce that has nothing to do with the step, tied to its token by lax.optimization_barrier."""

    def body(carry, _):
        state, token, numbers = carry
        total, token = lax.optimization_barrier((summed(weights.mesh, numbers), token))
        output, state = decode.decode_step(weights, state, token)
        return (state, output.token, numbers + 1), (output.token, total.sum())

    return lax.scan(body, (state, token, numbers), None, length=200)


def unordered(weights, state, token, numbers):
    """What the rule forbids: neither waits for the other."""

    def body(carry, _):
        state, token, numbers = carry
        total = summed(weights.mesh, numbers)
        output, state = decode.decode_step(weights, state, token)
        return (state, output.token, numbers + 1), (output.token, total.sum())

    return lax.scan(body, (state, token, numbers), None, length=200)


def overlap(thunks) -> bool:
    """Whether a custom call is enqueued while a collective may be running on another stream."""
    running = set()
    for (_, kind, line), (_, held, _) in itertools.pairwise([*thunks, (0, "", "")]):
        if kind == "AsyncStart" and held in ("CollectiveKernel", "AllReduce", "AllGather"):
            running.add(line.split("async_id=")[1].split()[0])
        elif kind == "AsyncDone":
            running.discard(line.split("async_id=")[1].split()[0])
        elif kind == "CustomCall" and running:
            return True
    return False


def operands(arrays, config, devices):
    """(weights, state, token, numbers) on a mesh of two devices."""
    weights = helpers.placed(config, arrays, devices)
    output, state = helpers.start(weights)
    numbers = np.random.default_rng(0).integers(-99, 99, (2, 1 << 20), np.int32)
    return weights, state, output.token, jax.device_put(numbers, NamedSharding(weights.mesh, P(AXIS)))


@pytest.mark.parametrize("program", [by_data, by_barrier])
def test_beside_collectives(two_gpus, program, tmp_path, same_bytes):
    """200 steps in a scan, each with an all-reduce of 4 MB before it, one also with an all-gather after it."""
    config = helpers.small_config()
    arrays = helpers.random_arrays(config, 5)
    results = []
    for devices, options in ((two_gpus, helpers.dump_to(tmp_path)), (jax.devices("cpu")[:2], None)):
        given = operands(arrays, config, devices)
        (state, _, numbers), values = jax.jit(program, donate_argnames=("state",), compiler_options=options)(*given)
        results.append(jax.tree.map(np.asarray, (values, helpers.caches(state), numbers)))
        given[0].communicator.check()
        given[0].communicator.close()
    same_bytes(*results)
    assert not overlap(helpers.thunks(tmp_path, program.__name__))


def test_why_they_must_be_ordered(two_gpus, tmp_path):
    """XLA starts an unordered collective before a step and ends it after: it is compiled here, never run."""
    config = helpers.small_config()
    given = operands(helpers.random_arrays(config, 5), config, two_gpus)
    jax.jit(unordered, compiler_options=helpers.dump_to(tmp_path)).lower(*given).compile()
    assert overlap(helpers.thunks(tmp_path, "unordered"))


# Two models ----------------------------------------------------------------------------------------------------------

STEPS = 200


@pytest.fixture
def two_models(gpus):
    """Two models of other shapes."""
    configs = [helpers.small_config(), helpers.small_config(hidden_size=384, sliding_window=5, num_attention_heads=8)]
    arrays = [helpers.random_arrays(config, seed) for seed, config in enumerate(configs)]
    yield from helpers.beside_the_cpu(configs, arrays, gpus, STEPS)


def stepped(step, weights, state, token, steps=STEPS):
    """Steps dispatched one after the other; nothing waits for the device."""
    tokens = []
    for _ in range(steps):
        output, state = step(weights, state, token)
        token = output.token
        tokens.append(token)
    return tokens, state


def in_threads(functions):
    """The functions' results; each runs in a thread, all start together."""
    results = [None] * len(functions)
    together = threading.Barrier(len(functions))

    def run(i):
        together.wait()
        results[i] = functions[i]()

    threads = [threading.Thread(target=run, args=(i,)) for i in range(len(functions))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert None not in results, "a thread ended with an error"
    return results


def generated(result):
    tokens, state = result
    return [np.stack([np.asarray(t) for t in tokens]), *helpers.caches(state)]


def test_two_models_in_turn(two_models, same_bytes):
    """One thread dispatches 200 steps of each, in turn, without waiting."""
    on_gpus, expected = two_models
    begun = [helpers.start(weights) for weights in on_gpus]
    states, tokens = [state for _, state in begun], [[output.token] for output, _ in begun]
    for _ in range(STEPS):
        for which, weights in enumerate(on_gpus):
            output, states[which] = helpers.single_step(weights, states[which], tokens[which][-1])
            tokens[which].append(output.token)
    for which in range(2):
        same_bytes(generated((tokens[which][1:], states[which])), expected[which])


# The option "off" launches operation by operation: more launches of two threads meet than between graphs.
GRAPHS = {"default": {}, "off": {"xla_gpu_enable_command_buffer": ""}}


@pytest.mark.parametrize("graphs", GRAPHS)
def test_two_models_in_two_threads(two_models, graphs, same_bytes):
    """Each thread dispatches 200 steps of its own model."""
    on_gpus, expected = two_models
    step = jax.jit(decode.decode_step, donate_argnames=("state",), compiler_options=GRAPHS[graphs])
    begun = [helpers.start(weights) for weights in on_gpus]
    work = [
        lambda weights=weights, state=state, token=output.token: stepped(step, weights, state, token)
        for weights, (output, state) in zip(on_gpus, begun, strict=True)
    ]
    for result, want in zip(in_threads(work), expected, strict=True):
        same_bytes(generated(result), want)


# A call clears its barriers by memsets before its kernel, and launches of two threads may interleave on one device.
@pytest.mark.parametrize("graphs", GRAPHS)
def test_two_threads_share_a_model(gpus, graphs, same_bytes):
    """Two states of one model and so of one communicator: a server with a thread per request."""
    config = helpers.small_config()
    arrays = helpers.random_arrays(config, 3)
    prompts = [[1, 2, 3], [9, 8, 7, 6, 5, 4, 3]]
    host = helpers.placed(config, arrays, jax.devices("cpu")[:1])
    weights = helpers.placed(config, arrays, gpus)
    step = jax.jit(decode.decode_step, donate_argnames=("state",), compiler_options=GRAPHS[graphs])
    work, expected = [], []
    for prompt in prompts:
        output, state = helpers.start(host, prompt)
        tokens, state = helpers.greedy(host, state, output.token, STEPS)
        expected.append([np.asarray(tokens), *helpers.caches(state)])
        output, state = helpers.start(weights, prompt)
        work.append(lambda state=state, token=output.token: stepped(step, weights, state, token))
    for result, want in zip(in_threads(work), expected, strict=True):
        same_bytes(generated(result), want)
    weights.communicator.check()
    weights.communicator.close()
