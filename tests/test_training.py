"""The reference trains: a tiny model learns a short text by heart, partly through quantised experts."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

from muse_jax.config import MuseSparkConfig
from muse_jax.mesh import make_mesh
from muse_jax.model import Reference
from muse_jax.weights import random_params

TEXT = b"bits are bits, here and there. "


def test_adam_lowers_the_loss():
    config = MuseSparkConfig.tiny().replace(
        vocab_size=256, hidden_size=128, num_hidden_layers=2, num_attention_heads=8, num_key_value_heads=8,
        moe_hidden_size=128, moe_intermediate_size=128, num_local_experts=8, num_experts_per_tok=2, sliding_window=8,
        layer_types=("sliding_attention", "full_attention"), layer_rope_theta=(10000.0, 0.0),
        expert_formats=("bf16", "nvfp4"), bos_token_id=0, eos_token_ids=(), pad_token_id=None,
    )  # fmt: skip
    mesh = make_mesh(8)
    run = Reference(config, mesh)
    tokens = jnp.asarray(np.frombuffer(TEXT * 2, np.uint8).reshape(2, -1), jnp.int32)
    # The optimiser's own copy is fp32, or its small steps would vanish in bf16; the model gets it rounded.
    stored = random_params(config, 1, mesh)
    dtypes = {name: w.dtype for name, w in stored.items()}
    weights = {name: w.astype(jnp.float32) for name, w in stored.items()}
    optimiser = optax.adam(3e-3)

    def loss(weights):
        return -jnp.mean(run.log_probs({name: w.astype(dtypes[name]) for name, w in weights.items()}, tokens))

    @jax.jit
    def step(weights, state):
        value, gradient = jax.value_and_grad(loss)(weights)
        change, state = optimiser.update(gradient, state)
        return optax.apply_updates(weights, change), state, value

    state, losses = optimiser.init(weights), []
    for _ in range(50):
        weights, state, value = step(weights, state)
        losses.append(float(value))
    assert np.isfinite(losses).all()
    assert losses[-1] < losses[0] / 100, losses
    experts = "layers.1.mlp.experts.down_proj"  # NVFP4 layer: the masters have moved
    assert np.mean(np.asarray(weights[experts].astype(jnp.bfloat16)) != np.asarray(stored[experts])) > 0.5
    router = weights["layers.1.mlp.gate.e_score_correction_bias"]
    assert np.array_equal(router, stored["layers.1.mlp.gate.e_score_correction_bias"])
