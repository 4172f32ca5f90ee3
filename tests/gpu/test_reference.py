"""The whole reference on GPUs: every tap has the CPU's bytes, on one device and on two; a training step."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from op_helpers import same

from muse_jax.config import MuseSparkConfig
from muse_jax.mesh import make_mesh
from muse_jax.model import Reference
from muse_jax.weights import random_params

KINDS = {
    "W4A4": dict(quantized=True, activation_format="nvfp4"),
    "W4A16": dict(quantized=True, activation_format="bf16"),
    "masters, W4A4": dict(quantized=False, activation_format="nvfp4"),
    "masters, W4A16": dict(quantized=False, activation_format="bf16"),
}
TOKENS = (2, 83)  # longer than the window, not a multiple of 8


def setting(kind):
    values = dict(KINDS[kind])
    quantized = values.pop("quantized")
    config = MuseSparkConfig.tiny().replace(**values)
    return config, quantized, np.random.default_rng(3).integers(0, config.vocab_size, TOKENS)


def taps(kind, devices):
    config, quantized, tokens = setting(kind)
    mesh = make_mesh(devices)
    with jax.default_device(devices[0]):
        params = random_params(config, 5, mesh, quantized=quantized)
        run = Reference(config, mesh)
        found = {**run.taps(params, tokens), "log_probs": run.log_probs(params, tokens)}
    return {name: np.asarray(x) for name, x in found.items()}


@functools.cache
def expected(kind):
    return taps(kind, jax.devices("cpu")[:1])


@pytest.mark.parametrize("kind", KINDS)
def test_taps(gpus, kind, tally):
    found = taps(kind, gpus)
    assert found.keys() == expected(kind).keys()
    tally(found, expected(kind))
    for name, value in expected(kind).items():
        same(found[name], value)
    assert np.isfinite(found["logits"]).all()


def test_random_params(gpu):
    """The generator quantises on the device; the bytes do not depend on it."""
    config, _, _ = setting("W4A4")
    results = []
    for device in (gpu, jax.devices("cpu")[0]):
        with jax.default_device(device):
            results.append(random_params(config, 5, make_mesh([device]), quantized=True))
    for name, value in results[0].items():
        same(value, results[1][name])


def trained(devices):
    """Two steps of gradient descent on two layers, one of each kind: losses, the first gradient."""
    config = MuseSparkConfig.tiny().replace(
        num_hidden_layers=2,
        layer_types=("sliding_attention", "full_attention"),
        layer_rope_theta=(500000.0, 0.0),
        expert_formats=("bf16", "nvfp4"),
        activation_format="bf16",
    )
    tokens = np.random.default_rng(3).integers(0, config.vocab_size, TOKENS)
    mesh = make_mesh(devices)
    with jax.default_device(devices[0]):
        params = random_params(config, 5, mesh)
        run = Reference(config, mesh)

        @jax.jit
        def step(params):
            loss, gradient = jax.value_and_grad(lambda p: -jnp.mean(run.log_probs(p, tokens)))(params)

            def move(p, g):
                return (p.astype(jnp.float32) - 0.02 * g.astype(jnp.float32)).astype(p.dtype)

            return jax.tree.map(move, params, gradient), loss, gradient

        params, first, gradient = step(params)
        _, second, _ = step(params)
    return float(first), float(second), {name: np.asarray(g, np.float64) for name, g in gradient.items()}


@functools.cache
def trained_on_the_host():
    return trained(jax.devices("cpu")[:1])


def test_training_step(gpus):
    first, second, gradient = trained(gpus)
    host_first, host_second, host_gradient = trained_on_the_host()
    # The losses have the same bits' log-probabilities; gradients are XLA's own arithmetic, which differs a little.
    assert first == pytest.approx(host_first, rel=1e-5) and second == pytest.approx(host_second, rel=1e-2)
    assert second < first
    for name, expected in host_gradient.items():
        assert np.linalg.norm(gradient[name] - expected) <= 0.02 * np.linalg.norm(expected), name
