"""The same model on the CPU and on GPUs, and the same work on both."""

import dataclasses

import jax
import numpy as np

from muse_jax import LanguageModel, MuseSparkConfig, decode, make_mesh
from muse_jax.parity import decoded_taps
from muse_jax.weights import random_params


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


def taps_of(model, prompt, steps, chunk):
    """decoded_taps as name -> bytes, and the tokens."""
    taps, tokens = decoded_taps(model, prompt, steps=steps, chunk=chunk)
    return {name: array.tobytes() for name, array in taps.items()}, tokens


def random_tree(rng, count, vocab):
    parents = [-1, *(int(rng.integers(0, node)) for node in range(1, count))]
    return rng.integers(0, vocab, count).tolist(), parents


def mixed_work(model, seed, steps=6):
    """Batches, inactive sequences, trees of several sequences in one step; every output and cache, in order."""
    rng = np.random.default_rng(seed)
    vocab, batch = model.config.vocab_size, int(rng.integers(1, 5))
    state = model.init_state(batch=batch, capacity=192)
    prompts = [rng.integers(0, vocab, rng.integers(1, 50)).tolist() for _ in range(batch)]
    output, state = model.prefill(state, prompts, chunk=int(rng.integers(1, 65)))
    found = [np.asarray(output.logits)]
    layers = jax.jit(decode.run_layers, static_argnames=("taps",), donate_argnames=("state",))
    head = jax.jit(decode.run_head)
    for _ in range(steps):
        active = rng.random(batch) < 0.8
        output, state = model.decode_step(state, rng.integers(0, vocab, batch), jax.numpy.asarray(active))
        found += [np.asarray(output.logits), np.asarray(output.token), np.asarray(output.nan)]
        rows = tree_of_all(rng, model, state, int(rng.integers(1, 17)))
        stream, state, taps = layers(model.weights, state, rows, taps=True)
        output = head(model.weights, state, rows, stream)
        found += [
            np.asarray(x) for x in (output.logits, output.token, taps.residuals, taps.experts, taps.weights, stream)
        ]
    found += [np.asarray(getattr(state, name)) for name in ("k_full", "v_full", "k_ring", "v_ring", "lengths")]
    return found


def tree_of_all(rng, model, state, nodes):
    """One random tree per sequence, their rows shuffled into one step with some inactive rows between."""
    lengths = np.asarray(state.lengths)
    per = max(1, min(nodes, 60 // state.batch))
    trees = [
        decode.tree_rows(*random_tree(rng, per, model.config.vocab_size), length=int(lengths[b]), sequence=b)
        for b in range(state.batch)
    ]
    total = per * state.batch + 3
    fields = {f.name: [np.asarray(getattr(t, f.name)) for t in trees] for f in dataclasses.fields(decode.Rows)}
    token, sequence, position = (np.concatenate(fields[n]) for n in ("token", "sequence", "position"))
    ancestors = np.zeros((total, total), bool)
    for b in range(state.batch):
        ancestors[b * per : (b + 1) * per, b * per : (b + 1) * per] = fields["ancestors"][b]
    token, position = (np.pad(x, (0, 3)) for x in (token, position))
    sequence = np.pad(sequence, (0, 3), constant_values=-1)
    # K and V slots follow the order of a sequence's rows, so only whole sequences and idle rows change places.
    order = np.argsort(np.where(sequence < 0, rng.random(total), 0.5 + sequence * 0.01), kind="stable")
    rows = decode.Rows(token[order], sequence[order], position[order], ancestors[np.ix_(order, order)])
    return jax.tree.map(jax.numpy.asarray, rows)
