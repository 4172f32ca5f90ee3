"""The fused decode kernels against the CPU's bits, on every number of GPUs that is here."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import golden_digests
import gpu_helpers as helpers
import jax
import numpy as np
import pytest

from muse_jax import MuseSparkConfig, decode, generate
from muse_jax.decoded import decode_text


def test_golden(gpus):
    expected = json.loads(golden_digests.PATH.read_text())
    found = golden_digests.compute(gpus)
    assert found["generated"] == expected["generated"]
    assert [n for n, digest in expected["taps"].items() if found["taps"][n] != digest] == []


@pytest.mark.parametrize("seed", range(60))
def test_random_configs(seed, same_bytes):
    """On one GPU and, where there are two, on both; the CPU works once for them."""
    config = helpers.random_config(np.random.default_rng(seed))
    arrays = helpers.random_arrays(config, seed)
    expected = helpers.random_work(helpers.placed(config, arrays, jax.devices("cpu")[:1]), seed)
    gpus = jax.devices("gpu")
    for count in (1, 2)[: len(gpus)]:
        weights = helpers.placed(config, arrays, gpus[:count])
        same_bytes(helpers.random_work(weights, seed), expected)
        weights.communicator.check()
        weights.communicator.close()


@pytest.mark.parametrize("offset", range(-2, 3))
def test_window_edges_and_long_context(gpus, offset, same_bytes):
    """Around the window, the ring's end and the 2048-position stretch."""
    config = helpers.small_config()
    cpu, gpu = helpers.twins(config, gpus)
    rng = np.random.default_rng(offset + 2)
    for length in (config.sliding_window + offset, 96 + offset, 2048 + offset):
        prompt = rng.integers(0, 256, length).tolist()
        found, expected = (decode_text(model, prompt, steps=4) for model in (gpu, cpu))
        assert found.tokens == expected.tokens
        same_bytes(found.taps, expected.taps)


def test_nan_row_stays_alone(gpus, same_bytes):
    config = MuseSparkConfig.tiny()
    params = helpers.host_params(config, 0)
    params["embed_tokens.weight"] = params["embed_tokens.weight"].copy()
    params["embed_tokens.weight"][7, 3] = np.nan
    models = [helpers.on_devices(config, params, devices) for devices in (jax.devices("cpu")[:1], gpus)]
    results = []
    for model in models:
        state = model.init_state(batch=3, capacity=64)
        output, state = model.prefill(state, [[1, 2], [3, 7], [4]])
        results.append([np.asarray(output.logits), np.asarray(output.nan), np.asarray(state.k_ring)])
        output, state = model.decode_step(state, [5, 5, 7])
        results[-1] += [np.asarray(output.logits), np.asarray(output.nan), np.asarray(output.token)]
    same_bytes(*results)
    assert results[1][1].tolist() == [False, True, False] and results[1][4].tolist() == [False, True, True]


def test_generate(gpus):
    cpu, gpu = helpers.twins(MuseSparkConfig.tiny(), gpus)
    prompts = [list(b"The same bits"), list(b"on every machine, however long the prompt is"), [5]]
    assert generate(gpu, prompts, max_new_tokens=24) == generate(cpu, prompts, max_new_tokens=24)


def test_two_models_at_once(gpus, same_bytes):
    """Two communicators alive, stepped in turn and inside one program."""
    configs = [MuseSparkConfig.tiny(), MuseSparkConfig.tiny().replace(sliding_window=5, hidden_size=384)]
    pairs = [helpers.twins(c, gpus, seed) for seed, c in enumerate(configs)]

    @jax.jit
    def both(weights, states, tokens):
        def body(_, carry):
            (s0, s1), (t0, t1) = carry
            o0, s0 = decode.decode_step(weights[0], s0, t0)
            o1, s1 = decode.decode_step(weights[1], s1, t1)
            return (s0, s1), (o0.token, o1.token)

        return jax.lax.fori_loop(0, 20, body, (states, tokens))

    results = []
    for side in range(2):
        models = [pair[side] for pair in pairs]
        starts = [m.prefill(m.init_state(capacity=64), [1, 2, 3]) for m in models]
        states, tokens = both(
            tuple(m.weights for m in models), tuple(s for _, s in starts), tuple(o.token for o, _ in starts)
        )
        results.append([np.asarray(t) for t in tokens] + [np.asarray(s.k_full) for s in states])
    same_bytes(*results)


def test_soak(gpus):
    """2,000 steps with random host delays."""
    config = MuseSparkConfig.tiny()
    cpu, gpu = helpers.twins(config, gpus)
    rng, texts = np.random.default_rng(0), []
    for model, delay in ((gpu, True), (cpu, False)):
        output, state = model.prefill(model.init_state(capacity=2048), [1, 2, 3])
        tokens = []
        for _ in range(2000):
            output, state = model.decode_step(state, output.token)
            tokens.append(output.token)
            if delay and rng.random() < 0.02:
                time.sleep(rng.random() * 0.005)
        texts.append(np.asarray(jax.numpy.stack([jax.device_put(t, jax.devices("cpu")[0]) for t in tokens])))
    gpu.weights.communicator.check()
    assert (texts[0] == texts[1]).all()


def test_two_processes(gpus):
    """One GPU each: the bits of one process with two."""
    if len(gpus) < 2:
        pytest.skip("needs two GPUs")
    script = Path(__file__).with_name("process_script.py")
    environment = os.environ | {"JAX_PLATFORMS": "cuda"}
    processes = [
        subprocess.Popen(
            [sys.executable, script, str(i)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=environment,
        )
        for i in range(2)
    ]
    outputs = [p.communicate(timeout=300)[0] for p in processes]
    assert all(p.returncode == 0 for p in processes), outputs[0][-3000:] + outputs[1][-3000:]
    config = MuseSparkConfig.tiny()
    model = helpers.on_devices(config, helpers.host_params(config, 0), gpus)
    output, state = model.prefill(model.init_state(capacity=64), [1, 2, 3])
    tokens = []
    for _ in range(20):
        output, state = model.decode_step(state, output.token)
        tokens.append(int(output.token[0]))
    for text in outputs:
        assert f"tokens {tokens}" in text
