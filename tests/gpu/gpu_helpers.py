"""The same model on the CPU and on GPUs, and the same work on both."""

import dataclasses
import functools
import itertools
import re

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax.sharding import NamedSharding

from muse_jax import LanguageModel, MuseSparkConfig, decode, make_mesh
from muse_jax.comm import Communicator
from muse_jax.decode.weights import SPECS
from muse_jax.mesh import ranks_array
from muse_jax.weights import random_params

CACHES = ("k_full", "v_full", "k_ring", "v_ring")


def on_devices(config, params, devices):
    """A LanguageModel with these host parameters on these devices."""
    from muse_jax.weights import check_params

    mesh = make_mesh(devices)
    specs, problems = check_params(config, params)
    assert not problems, problems
    placed = {name: jax.device_put(array, specs[name].sharding(mesh)) for name, array in params.items()}
    return LanguageModel(config, placed, mesh)


def host_params(config, seed, quantized=False):
    cpu = jax.devices("cpu")[0]
    with jax.default_device(cpu):
        return {k: np.asarray(v) for k, v in random_params(config, seed, make_mesh([cpu]), quantized=quantized).items()}


def twins(config, gpus, seed=0):
    """(model on one CPU device, model on the GPUs)."""
    params = host_params(config, seed)
    return on_devices(config, params, jax.devices("cpu")[:1]), on_devices(config, params, gpus)


def random_config(rng) -> MuseSparkConfig:
    """A small model with every feature, all sizes drawn."""
    layers = int(rng.integers(1, 5))
    kv = int(rng.choice([8, 8, 8, 16]))
    experts = int(rng.choice([8, 16, 24]))
    full = rng.integers(0, 2, layers).astype(bool)
    rope = rng.integers(0, 2, layers).astype(bool)
    return MuseSparkConfig.tiny().replace(
        num_hidden_layers=layers, vocab_size=int(rng.integers(8, 40)) * 8, bos_token_id=0, eos_token_ids=(),
        pad_token_id=None, hidden_size=128 * int(rng.integers(1, 4)),
        num_key_value_heads=kv, num_attention_heads=kv * int(rng.choice([1, 2, 3, 8])),
        moe_hidden_size=128 * int(rng.integers(1, 4)), moe_intermediate_size=128 * int(rng.integers(1, 4)),
        num_local_experts=experts, num_experts_per_tok=int(rng.integers(1, 9)), sliding_window=int(rng.integers(1, 41)),
        layer_types=tuple("full_attention" if f else "sliding_attention" for f in full),
        layer_rope_theta=tuple(500000.0 if r else 0.0 for r in rope),
        expert_formats=tuple(str(f) for f in rng.choice(["bf16", "nvfp4"], layers)),
        activation_format=str(rng.choice(["bf16", "nvfp4"])),
    )  # fmt: skip


def dump_to(folder) -> dict[str, bool | int | float | str]:
    """Compiler options that make XLA write down what it compiled; `thunks` reads it."""
    return {"xla_dump_to": str(folder), "xla_dump_hlo_as_text": True}


def thunks(folder, program) -> list[tuple[int, str, str]]:
    """(depth, kind, line) of what a dumped program does, in the order in which it is enqueued.

    XLA writes one thunk per line, what a graph or a loop holds indented below it ("condition:" and "body:" between).
    """
    after = list(
        folder.glob(f"*.jit_{program}.thunk_sequence_after_thunk_passes.txt")
    )  # absent if they changed nothing
    [path] = after or folder.glob(f"*.jit_{program}.thunk_sequence.txt")
    matches = [re.match(r"( *)\d+: k(\w+)", line) for line in path.read_text().splitlines()]
    return [(len(m[1]), m[2], m.string) for m in matches if m]


# Random packed weights and random work --------------------------------------------------------------------------------


def random_arrays(config, seed) -> dict[str, np.ndarray]:
    """Packed weights (DecodeWeights' arrays) of a small model, straight from NumPy.

    Nothing is compiled for them, which is most of what a model made by random_params and repack costs.
    """
    rng = np.random.default_rng(seed)
    c, layers = config, config.num_hidden_layers
    h, m, i, e = c.hidden_size, c.moe_hidden_size, c.moe_intermediate_size, c.num_local_experts
    q, kv, v = c.attention_size // 8, c.num_key_value_heads * 8, c.vocab_size // 8
    quantised = np.array([f == "nvfp4" for f in c.expert_formats])
    plain, coded = max(int((~quantised).sum()), 1), max(int(quantised.sum()), 1)
    w13, w2 = (2 * i // 8 // 16, m // 16), (m // 8 // 16, i // 16)

    def normal(std, *shape, mean=0.0):
        return (rng.standard_normal(shape, np.float32) * np.float32(std) + np.float32(mean)).astype(ml_dtypes.bfloat16)

    def panels(groups, k):
        """NVFP4 panels: any codes, scales 0.25 to 0.9375, zeros where a segment ends inside a panel."""
        blocks, count = k // 128, -(-k // 1024)
        raw = rng.integers(0, 256, (8, coded, e, groups, 8, count, 1152), np.uint8)
        codes = raw[..., :1024].reshape(*raw.shape[:-1], 2, 32, 4, 4)  # quad, lane, block of the quad, byte
        scales = 0x28 + (raw[..., 1024:] & 15).reshape(*raw.shape[:-1], 8, 8, 2)  # row, block, row half
        inside = np.arange(8 * count).reshape(count, 8) < blocks
        codes *= inside.reshape(count, 2, 1, 4, 1)
        scales *= inside.reshape(count, 1, 8, 1)
        flat = (*raw.shape[:-1], -1)
        return np.concatenate([codes.reshape(flat), scales.reshape(flat)], axis=-1)

    beta = rng.uniform(0.05, 0.4, (layers, 2, h)).astype(np.float32)
    alpha = np.sqrt(1 - beta * beta)
    factor = np.where(quantised, rng.uniform(0.005, 0.05, layers), 1.0).astype(np.float32)
    return {
        "embed": normal(1, 8, v, h), "hidden_gains": normal(0.2, layers, 3, h, mean=1),
        "moe_gains": normal(0.2, layers, 2, m, mean=1), "final_gain": normal(0.2, h, mean=1),
        "gates": np.stack([alpha, beta], axis=2).reshape(layers, 4, h),
        "qkvu": normal(h**-0.5, 8, layers, (2 * q + 2 * kv) // 16, h // 16, 256),
        "o": normal((8 * q) ** -0.5, 8, layers, h // 16, q // 16, 256),
        "router": normal(0.1, 8, layers, e // 8, h).astype(np.float32),
        "router_bias": rng.normal(0, 0.1, (layers, e)).astype(np.float32),
        "pre_expert": normal(h**-0.5, 8, layers, m // 8 // 16, h // 16, 256),
        "post_expert": normal(m**-0.5, 8, layers, h // 16, m // 8 // 16, 256),
        "w13_bf16": normal(m**-0.5, 8, plain, e, *w13, 256), "w2_bf16": normal(i**-0.5, 8, plain, e, *w2, 256),
        "w13_fp4": panels(w13[0], m), "w2_fp4": panels(w2[0], i),
        "scale_2": rng.uniform(0.5, 2, (layers, e, 3)).astype(np.float32) * factor[:, None, None],
        "input_scales": rng.uniform(0.5, 2, (layers, 2)).astype(np.float32) * factor[:, None],
        "lm_head": normal(0.5 * h**-0.5, 8, -(-v // 16), h // 16, 256),
    }  # fmt: skip


_packings = itertools.count(1 << 20)  # apart from repack's


def placed(config, arrays, devices) -> decode.DecodeWeights:
    """Packed arrays on these devices, with a communicator of their own."""
    mesh = make_mesh(devices)
    on_mesh = {
        name: jax.device_put(arrays[name], NamedSharding(mesh, spec)) for name, spec in SPECS.items() if name != "ranks"
    }
    return decode.DecodeWeights(
        **on_mesh, ranks=ranks_array(mesh, next(_packings)), config=config, mesh=mesh,
        communicator=Communicator(config, mesh),
    )  # fmt: skip


def start(weights, prompt=(1, 2, 3), capacity=256):
    """(output, state) after a prompt."""
    return decode.prefill(weights, decode.init_state(weights.config, weights.mesh, capacity=capacity), [prompt])


@functools.partial(jax.jit, donate_argnames=("state",))
def tapped_step(weights, state, rows, commit):
    """One step of any rows with everything it says; `commit` int32 [B] is added to the lengths."""
    stream, state, taps = decode.run_layers(weights, state, rows, taps=True)
    output = decode.run_head(weights, state, rows, stream)
    return (output, stream, taps), dataclasses.replace(state, lengths=state.lengths + commit)


single_step = jax.jit(decode.decode_step, donate_argnames=("state",))


def until(weights, state, token, end):
    """Greedy steps until the length is `end`, which only the device knows."""

    def body(carry):
        state, token = carry
        output, state = decode.decode_step(weights, state, token)
        return state, output.token

    return jax.lax.while_loop(lambda carry: carry[0].lengths[0] < end, body, (state, token))


@functools.partial(jax.jit, static_argnames=("steps",), donate_argnames=("state",))
def greedy(weights, state, token, steps):
    """(tokens [steps, B], state) of greedy steps in one program."""

    def body(carry, _):
        state, token = carry
        output, state = decode.decode_step(weights, state, token)
        return (state, output.token), output.token

    (state, _), tokens = jax.lax.scan(body, (state, token), None, length=steps)
    return tokens, state


def beside_the_cpu(configs, arrays, gpus, steps, capacity=256):
    """Yields (weights on the GPUs, what each generates on the CPU: a list of arrays); then checks and closes."""
    on_gpus = [placed(config, own, gpus) for config, own in zip(configs, arrays, strict=True)]
    expected = []
    for config, own in zip(configs, arrays, strict=True):
        weights = placed(config, own, jax.devices("cpu")[:1])
        output, state = start(weights, capacity=capacity)
        tokens, state = greedy(weights, state, output.token, steps)
        expected.append([np.asarray(tokens), *caches(state)])
    yield on_gpus, expected
    for weights in on_gpus:
        weights.communicator.check()
        weights.communicator.close()


def caches(state) -> list[np.ndarray]:
    return [np.asarray(getattr(state, name)) for name in CACHES]


def small_config(**changes) -> MuseSparkConfig:
    """Two layers, one of each kind and format."""
    return MuseSparkConfig.tiny().replace(
        num_hidden_layers=2, layer_types=("sliding_attention", "full_attention"), layer_rope_theta=(500000.0, 0.0),
        expert_formats=("nvfp4", "bf16"), **changes,
    )  # fmt: skip


def random_work(weights, seed, steps=6) -> list[np.ndarray]:
    """Prompts of a batch, then single steps with inactive sequences and trees in turn; every output and the caches.

    Two programs do it all, the step of one row per sequence and the step of a fixed number of rows.
    """
    rng = np.random.default_rng(seed)
    vocab, batch, size = weights.config.vocab_size, int(rng.integers(1, 5)), int(rng.integers(1, 65))
    state = decode.init_state(weights.config, weights.mesh, batch=batch, capacity=192)
    lengths = rng.integers(1, [150, *[40] * (batch - 1)])
    sequence = np.repeat(np.arange(batch), lengths)
    position = np.concatenate([np.arange(n) for n in lengths])
    token = rng.integers(0, vocab, len(sequence))
    found = []
    for begin in range(0, len(sequence), size):
        part = [x[begin : begin + size].tolist() for x in (token, sequence, position)]
        rows = decode.chain_rows(*part, size)
        commit = np.bincount(part[1], minlength=batch).astype(np.int32)
        values, state = tapped_step(weights, state, rows, commit)
        found += jax.tree.leaves(values)
    for _ in range(steps):
        active = rng.random(batch) < 0.8
        output, state = single_step(weights, state, jnp.asarray(rng.integers(0, vocab, batch), jnp.int32), active)
        lengths = lengths + active
        found += jax.tree.leaves(output)
        values, state = tapped_step(weights, state, random_trees(rng, vocab, lengths, size), np.zeros(batch, np.int32))
        found += jax.tree.leaves(values)
    return [*map(np.asarray, found), *caches(state), np.asarray(state.lengths)]


def random_trees(rng, vocab, lengths, size) -> decode.Rows:
    """A random tree for each of some sequences, in one step of `size` rows; idle rows between, rows interleaved."""
    per = max(1, size // len(lengths))
    trees = [
        decode.tree_rows(
            rng.integers(0, vocab, count).tolist(), [-1, *(int(rng.integers(-1, n)) for n in range(1, count))],
            length=int(lengths[b]), sequence=b,
        )
        for b, count in enumerate(rng.integers(1, per + 1, min(size, len(lengths))))
    ]  # fmt: skip
    idle = size - sum(len(t.token) for t in trees)
    token, sequence, position = (
        np.concatenate([*(getattr(t, name) for t in trees), np.full(idle, fill, np.int32)])
        for name, fill in (("token", 0), ("sequence", -1), ("position", 0))
    )
    ancestors = np.zeros((size, size), bool)
    begin = 0
    for tree in trees:
        end = begin + len(tree.token)
        ancestors[begin:end, begin:end] = tree.ancestors
        begin = end
    # K and V slots follow the order of a sequence's rows, so rows of one sequence keep their order.
    keys = rng.random(size)
    for b in range(len(trees)):
        keys[sequence == b] = np.sort(keys[sequence == b])
    order = np.argsort(keys)
    return decode.Rows(token[order], sequence[order], position[order], ancestors[np.ix_(order, order)])
