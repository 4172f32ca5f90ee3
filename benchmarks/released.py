"""Random packed weights at the released layer shapes, made on the devices themselves; for benchmarks and GPU tests."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding

from muse_jax import MuseSparkConfig
from muse_jax.comm import Communicator
from muse_jax.decode import DecodeWeights
from muse_jax.decode.weights import SPECS
from muse_jax.mesh import ranks_array
from muse_jax.weights.repack import PANEL_BYTES, SEGMENTS, panel_count


def slice_config(layers: int) -> MuseSparkConfig:
    """The released model cut to its first layers after layer 0: NVFP4 experts, full attention first, then sliding."""
    full = MuseSparkConfig.released()
    return full.replace(
        num_hidden_layers=layers, layer_types=full.layer_types[1 : layers + 1],
        layer_rope_theta=full.layer_rope_theta[1 : layers + 1], expert_formats=("nvfp4",) * layers,
    )  # fmt: skip


def random_decode_weights(config: MuseSparkConfig, mesh, seed: int = 0) -> DecodeWeights:
    """DecodeWeights with the released statistics, without a checkpoint or a training layout behind them.

    Not reproducible across platforms: copy the arrays to compare backends.
    """
    layers, h, m, i = config.num_hidden_layers, config.hidden_size, config.moe_hidden_size, config.moe_intermediate_size
    e, q = config.num_local_experts, config.attention_size // 8
    kv, v = config.num_key_value_heads * 8, config.vocab_size // 8
    quantised = sum(f == "nvfp4" for f in config.expert_formats)
    plain = layers - quantised
    w13, w2 = (2 * i // 8 // 16, m // 16), (m // 8 // 16, i // 16)

    # name -> shape, and the standard deviation of a bf16 array
    dense = {
        "embed": ((8, v, h), 1.0),
        "qkvu": ((8, layers, (2 * q + 2 * kv) // 16, h // 16, 256), 1 / math.sqrt(h)),
        "o": ((8, layers, h // 16, q // 16, 256), 1 / math.sqrt(8 * q)),
        "pre_expert": ((8, layers, m // 8 // 16, h // 16, 256), 1 / math.sqrt(h)),
        "post_expert": ((8, layers, h // 16, m // 8 // 16, 256), 1 / math.sqrt(m)),
        "w13_bf16": ((8, max(plain, 1), e, *w13, 256), 1 / math.sqrt(m)),
        "w2_bf16": ((8, max(plain, 1), e, *w2, 256), 1 / math.sqrt(i)),
        "lm_head": ((8, -(-v // 16), h // 16, 256), 0.5 / math.sqrt(h)),
    }
    panels = {
        "w13_fp4": (8, max(quantised, 1), e, w13[0], SEGMENTS, panel_count(m), PANEL_BYTES),
        "w2_fp4": (8, max(quantised, 1), e, w2[0], SEGMENTS, panel_count(i), PANEL_BYTES),
    }
    keys = iter(jax.random.split(jax.random.key(seed), 64))

    def make(name, function):
        return jax.jit(function, out_shardings=NamedSharding(mesh, SPECS[name]))(next(keys))

    def normal(shape, std, mean=0.0, dtype=jnp.bfloat16):
        # Four uniform bytes make a bell curve, and cost a tenth of jax.random.normal's memory.
        def f(key):
            bits = jax.random.bits(key, shape, jnp.uint32)
            total = sum(((bits >> (8 * b)) & 255).astype(jnp.float32) for b in range(4))
            return ((total - 510.0) * (std / 147.8) + mean).astype(dtype)

        return f

    def panel_bytes(shape, key):
        # Codes of any value, then scales from 0x28 to 0x37, which are 0.25 to 0.9375.
        bits = jax.random.bits(key, shape, jnp.uint8)
        return jnp.where(lax.broadcasted_iota(jnp.uint16, shape, len(shape) - 1) < 1024, bits, 0x28 + (bits & 15))

    unused = {"w13_bf16": not plain, "w2_bf16": not plain}
    arrays = {}
    for name, (shape, std) in dense.items():
        arrays[name] = (
            make(name, lambda k, s=shape: jnp.zeros(s, jnp.bfloat16))
            if unused.get(name)
            else make(name, normal(shape, std))
        )
    for name, shape in panels.items():
        arrays[name] = make(name, functools.partial(panel_bytes, shape))
    beta = 0.16
    gates = jnp.array([math.sqrt(1 - beta**2), beta] * 2, jnp.float32)[None, :, None]
    arrays |= {
        "hidden_gains": make("hidden_gains", normal((layers, 3, h), 0.2, 1.0)),
        "moe_gains": make("moe_gains", normal((layers, 2, m), 0.2, 1.0)),
        "final_gain": make("final_gain", normal((h,), 0.2, 1.0)),
        "gates": make("gates", lambda _: jnp.broadcast_to(gates, (layers, 4, h))),
        "router": make("router", normal((8, layers, e // 8, h), 0.1, dtype=jnp.float32)),
        "router_bias": make("router_bias", normal((layers, e), 0.1, dtype=jnp.float32)),
        "scale_2": make("scale_2", lambda _: jnp.full((layers, e, 3), 1 / 64, jnp.float32)),
        "input_scales": make("input_scales", lambda _: jnp.full((layers, 2), 1 / 64, jnp.float32)),
    }
    return DecodeWeights(
        **arrays, ranks=ranks_array(mesh, seed), config=config, mesh=mesh, communicator=Communicator(config, mesh)
    )


def on_mesh(weights: DecodeWeights, mesh) -> DecodeWeights:
    """The same bits on another mesh, by way of the host."""
    import numpy as np

    arrays = {
        name: jax.device_put(np.asarray(getattr(weights, name)), NamedSharding(mesh, spec))
        for name, spec in SPECS.items()
    }
    return dataclasses.replace(weights, **arrays, mesh=mesh, communicator=Communicator(weights.config, mesh))
