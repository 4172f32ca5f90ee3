"""The fused step gives the bytes of the NumPy oracle and of the reference, however the work is cut up."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from decode_helpers import (
    FULL,
    SLIDING,
    assert_caches,
    assert_values,
    cached,
    decode_all,
    drawn,
    make_model,
    named,
    one_layer,
    small,
    step,
    tapped,
)
from op_helpers import same

from muse_jax.decode import chain_rows, next_rows, prefill, prefill_whole, run_head, run_layers
from muse_jax.mesh import make_mesh
from muse_jax.weights.repack import repack

# These have every value of every dimension that the twenty have.
FAST = (0, 1, 2, 3, 4, 7, 9, 11, 16, 18)
SEEDS = [*FAST, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(20) if seed not in FAST)]


@pytest.fixture(scope="module")
def model():
    """Two layers of each kind, two of each format."""
    return make_model(
        small(
            num_hidden_layers=4, layer_types=(SLIDING, FULL, SLIDING, FULL),
            layer_rope_theta=(500000.0, 0.0, 500000.0, 500000.0), expert_formats=("bf16", "nvfp4", "nvfp4", "bf16"),
            vocab_size=72, sliding_window=9,
        ),
        seed=3,
    )  # fmt: skip


def texts(model, seed: int, *lengths: int) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, model.config.vocab_size, n) for n in lengths]


# Against the oracle and the reference --------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", SEEDS)
def test_random_models(seed):
    """Chunked prefill, then single steps, for a batch of different lengths: every tap, cache and logit."""
    rng = np.random.default_rng(1000 + seed)
    config = drawn(seed)
    # Every fifth model is given as masters, which repack, reference and oracle quantise each for itself.
    model = make_model(config, seed, devices=(8, 1, 8, 2, 8, 4)[seed % 6], quantized=seed % 5 != 0)
    batch = int(rng.integers(1, 5))
    prompts = rng.integers(1, 17, batch)
    sequences = texts(model, seed, *(prompts + rng.integers(0, 6, batch)))
    got, state = decode_all(model, sequences, prompts, chunk=int(rng.choice([1, 3, 7, 16, 33, 64])))

    padded = np.zeros((batch, max(map(len, sequences))), np.int32)
    for row, tokens in zip(padded, sequences, strict=True):
        row[: len(tokens)] = tokens
    reference = model.reference(padded)
    for b, tokens in enumerate(sequences):
        want = model.oracle(tokens)
        assert_values({name: x[b][: len(tokens)] for name, x in reference.items()}, want)
        assert_values(got[b], want)
        assert_caches(model, state, want, b)
        same(got[b]["nan"], np.zeros(len(tokens), bool))
        same(got[b]["token"], np.argmax(want["logits"], axis=-1).astype(np.int32))


def test_window_ring_and_chunk_boundaries():
    """One sequence beyond the ring (80 slots for a window of 9), 128 positions and back round the ring again."""
    config = small(sliding_window=9, layer_rope_theta=(500000.0, 500000.0))
    model = make_model(config, 1)
    (tokens,) = texts(model, 1, 170)
    got, state = decode_all(model, [tokens], [120], chunk=64, capacity=176)
    want = {name: x[0] for name, x in model.reference(tokens[None]).items()}
    assert_values(got[0], want)
    assert_caches(model, state, want)
    assert_values({"logits": got[0]["logits"][:140]}, model.oracle(tokens[:140]))


@pytest.mark.parametrize("activations", ["bf16", "nvfp4"])
def test_wide_experts(activations):
    """GEMMs whose segments are one full NVFP4 panel, and two of which the second is nearly empty."""
    config = one_layer(expert_formats=("nvfp4",), moe_hidden_size=1024, moe_intermediate_size=1152,
                       activation_format=activations)  # fmt: skip
    model = make_model(config, 2)
    (tokens,) = texts(model, 2, 3)
    got, _ = decode_all(model, [tokens], [2], chunk=2)
    assert_values(got[0], model.oracle(tokens))
    assert_values(got[0], {name: x[0] for name, x in model.reference(tokens[None]).items()})


# Batches -------------------------------------------------------------------------------------------------------------


def test_each_sequence_of_a_batch_is_as_if_alone(model):
    sequences = texts(model, 4, 30, 7, 19, 1)
    got, state = decode_all(model, sequences, [22, 3, 12, 1], chunk=5)
    for b, tokens in enumerate(sequences):
        alone, own = decode_all(model, [tokens], [len(tokens)], chunk=64)
        assert_values(got[b], alone[0])
        for name, (first, values) in cached(model, own).items():
            assert cached(model, state, b)[name][0] == first
            same(cached(model, state, b)[name][1], values)


def test_a_batch_in_another_order(model):
    sequences = texts(model, 5, 13, 8, 21)
    prompts = [9, 8, 2]
    got, _ = decode_all(model, sequences, prompts, chunk=16)
    order = [2, 0, 1]
    other, _ = decode_all(model, [sequences[b] for b in order], [prompts[b] for b in order], chunk=16)
    for b, values in zip(order, other, strict=True):
        assert_values(values, got[b])


def test_inactive_sequences_keep_their_length_and_caches(model):
    sequences = texts(model, 6, 11, 6)
    _, state = prefill(model.weights, model.state(2), [s.tolist() for s in sequences])
    before = cached(model, state, 1)
    output, after = step(model.weights, state, [5, 9], [True, False])
    assert after.lengths.tolist() == [12, 6]
    same(np.asarray(output.logits)[1], np.zeros(model.config.vocab_size, np.float32))
    assert output.token.tolist()[1] == -1 and not output.nan[1]
    for name, (_, values) in cached(model, after, 1).items():
        same(values, before[name][1])
    both, _ = step(model.weights, state, [5, 9])
    same(np.asarray(output.logits)[0], np.asarray(both.logits)[0])
    late, _ = step(model.weights, after, [0, 9], [False, True])
    same(np.asarray(late.logits)[1], np.asarray(both.logits)[1])


# Devices -------------------------------------------------------------------------------------------------------------


def everything(model, seed: int = 7) -> dict[str, np.ndarray]:
    """All bytes that a short text leaves behind."""
    sequences = texts(model, seed, 26, 14)
    got, state = decode_all(model, sequences, [20, 11], chunk=16)
    out = {f"{b}.{name}": x for b, values in enumerate(got) for name, x in values.items()}
    return out | {name: np.asarray(getattr(state, name)) for name in ("k_full", "v_full", "k_ring", "v_ring")}


@pytest.fixture(scope="module")
def everything_on_8():
    return everything(make_model(drawn(31), 31, 8))


@pytest.mark.parametrize("devices", [1, 2, 4])
def test_fewer_devices(everything_on_8, devices):
    got = everything(make_model(drawn(31), 31, devices))
    assert got.keys() == everything_on_8.keys()
    assert_values(got, everything_on_8)


@pytest.mark.parametrize("order", [[7, 6, 5, 4, 3, 2, 1, 0], [3, 7, 0, 5, 1, 6, 2, 4], [6, 1, 4, 3], [5, 2]], ids=str)
def test_devices_in_another_order(everything_on_8, order):
    """Which device holds which ranks is the mesh's business alone."""
    devices = jax.devices()
    assert_values(everything(make_model(drawn(31), 31, [devices[i] for i in order])), everything_on_8)


# Prefill -------------------------------------------------------------------------------------------------------------


def test_every_chunking_gives_the_same_caches(model):
    sequences = texts(model, 8, 41, 3, 29)
    prompts = [s.tolist() for s in sequences]
    results = [prefill(model.weights, model.state(3), prompts, chunk=chunk) for chunk in (64, 1, 13, 16)]
    (want, want_state), *others = results
    for output, state in others:
        for name in ("logits", "token", "nan"):
            same(getattr(output, name), getattr(want, name))
        assert state.lengths.tolist() == [41, 3, 29]
        for b in range(3):
            for name, (_, values) in cached(model, state, b).items():
                same(values, cached(model, want_state, b)[name][1])


def test_a_prompt_in_two_parts(model):
    sequences = texts(model, 9, 33, 12)
    parts = ([s[:n].tolist() for s, n in zip(sequences, (20, 0), strict=True)],
             [s[n:].tolist() for s, n in zip(sequences, (20, 0), strict=True)])  # fmt: skip
    first, state = prefill(model.weights, model.state(2), parts[0], chunk=7)
    assert first.token[1] == -1 and not np.asarray(first.logits)[1].any()
    output, state = prefill(model.weights, state, parts[1], chunk=64)
    want, _ = prefill(model.weights, model.state(2), [s.tolist() for s in sequences])
    same(output.logits, want.logits)
    assert state.lengths.tolist() == [33, 12]


@pytest.mark.parametrize("lengths", [(90, 5, 81), (1, 2, 16)], ids=str)
def test_whole_prefill(model, lengths):
    """Through the reference, beyond the ring and short of it: the same caches, logits and next step."""
    prompts = [s.tolist() for s in texts(model, 10, *lengths)]
    output, state = prefill(model.weights, model.state(3), prompts)
    whole, whole_state = prefill_whole(model.config, model.state(3), prompts, model.reference_arrays)
    for name in ("logits", "token", "nan"):
        same(getattr(whole, name), getattr(output, name))
    assert whole_state.lengths.tolist() == list(lengths)
    for b in range(3):
        for name, (_, values) in cached(model, whole_state, b).items():
            same(values, cached(model, state, b)[name][1])
    same(step(model.weights, whole_state, [3, 4, 5])[0].logits, step(model.weights, state, [3, 4, 5])[0].logits)


# Cutting the layers --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cuts", [(0, 1, 2, 3, 4), (0, 0, 3, 3, 4), (0, 2, 4)], ids=str)
def test_layer_ranges(model, cuts):
    """Layers run one range at a time, with the stream handed on, are one call over all of them."""
    (tokens,) = texts(model, 11, 18)
    rows = chain_rows(tokens[:12].tolist(), [0] * 12, list(range(12)), 16)
    want, want_state = tapped(model.weights, model.state(), rows)

    @jax.jit
    def in_ranges(weights, state, rows):
        stream, taps = None, []
        for begin, end in itertools.pairwise(cuts):
            stream, state, part = run_layers(weights, state, rows, layers=(begin, end), stream=stream, taps=True)
            taps.append(part)
        joined = jax.tree.map(lambda *parts: jnp.concatenate(parts), *[t for t in taps if t.experts.shape[0]])
        return joined, run_head(weights, state, rows, stream), state

    taps, output, state = in_ranges(model.weights, model.state(), rows)
    assert_values(named(taps, output), want)
    for name in ("k_full", "v_full", "k_ring", "v_ring"):
        same(getattr(state, name), getattr(want_state, name))


def test_no_layers_is_the_embedding(model):
    (tokens,) = texts(model, 12, 5)
    rows = chain_rows(tokens.tolist(), [0] * 5, list(range(5)), 7)
    stream, _, _ = run_layers(model.weights, model.state(), rows, layers=(0, 0))
    want = model.oracle(tokens)["embedding"]
    same(stream, np.concatenate([want, np.zeros((2, want.shape[1]), np.float32)]))


def test_last_layer_decides_nothing_earlier():
    """A changed last layer leaves the taps and caches before it alone (so the comparisons above have teeth)."""
    config = one_layer(num_hidden_layers=2, layer_types=(FULL, FULL), layer_rope_theta=(0.0, 0.0),
                       expert_formats=("bf16", "bf16"))  # fmt: skip
    model = make_model(config, 13)
    name = "layers.1.self_attn.v_proj.weight"
    flipped = np.array(model.params[name])
    flipped.view(np.uint16)[5, 3] ^= 0x40  # one bit of one number
    params = model.params | {name: jax.device_put(flipped, model.params[name].sharding)}
    weights = repack(config, params, make_mesh(8))
    rows = next_rows(jnp.zeros(1, jnp.int32), jnp.array([9], jnp.int32))
    (values, state), (other, other_state) = (tapped(w, model.state(), rows) for w in (model.weights, weights))
    assert_values(other, values, names=[n for n in values if n.startswith("layers.0.")])
    same(np.asarray(other_state.v_full)[:, 0], np.asarray(state.v_full)[:, 0])
    assert (np.asarray(other_state.v_full) != np.asarray(state.v_full)).any()
