"""Random packed weights at the released layer shapes, made on the devices themselves; for benchmarks and GPU tests."""

import dataclasses
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


def released_arrays(config: MuseSparkConfig, mesh, ranks: int = 8, seed: int = 0) -> dict[str, jax.Array]:
    """The arrays of DecodeWeights with the released statistics, without a checkpoint or a training layout behind them.

    `ranks`: how many of the eight the mesh's devices hold. One layer is drawn, the others are that one changed, which
    costs neither time nor memory. Not reproducible across platforms: copy the arrays to compare backends.
    """
    layers, h, m, i = config.num_hidden_layers, config.hidden_size, config.moe_hidden_size, config.moe_intermediate_size
    e, q = config.num_local_experts, config.attention_size // 8
    kv, v = config.num_key_value_heads * 8, config.vocab_size // 8
    quantised = sum(f == "nvfp4" for f in config.expert_formats)
    plain = layers - quantised
    w13, w2 = (2 * i // 8 // 16, m // 16), (m // 8 // 16, i // 16)
    keys = iter(jax.random.split(jax.random.key(seed), 64))

    def make(name, function, *operands):
        return jax.jit(function, out_shardings=NamedSharding(mesh, SPECS[name]))(*operands)

    def normal(shape, std, mean=0.0, dtype=jnp.bfloat16):
        # Four uniform bytes make a bell curve, and cost a tenth of jax.random.normal's memory.
        def f(key):
            bits = jax.random.bits(key, shape, jnp.uint32)
            total = sum(((bits >> (8 * b)) & 255).astype(jnp.float32) for b in range(4))
            return ((total - 510.0) * (std / 147.8) + mean).astype(dtype)

        return f

    def per_layer(name, count, shape, std, dtype=jnp.bfloat16):
        """[ranks, count, *shape]; layers differ by a factor."""
        if not count:  # a kind that no layer has
            return make(name, lambda: jnp.zeros((ranks, 1, *shape), dtype))
        base = make(name, normal((ranks, *shape), std, dtype=dtype), next(keys))
        factor = 1.0 + jnp.arange(count, dtype=jnp.float32).reshape(1, count, *[1] * len(shape)) / 256
        return make(name, lambda x: (x[:, None].astype(jnp.float32) * factor).astype(dtype), base)

    def panels(name, count, shape):
        """Codes of any value, then scales from 0x28 to 0x37, which are 0.25 to 0.9375; layers differ in the codes."""
        if not count:
            return make(name, lambda: jnp.zeros((ranks, 1, *shape), jnp.uint8))

        def is_code(rank):
            return lax.broadcasted_iota(jnp.uint16, (1,) * (rank - 1) + (PANEL_BYTES,), rank - 1) < 1024

        def draw(key):
            bits = jax.random.bits(key, (ranks, *shape), jnp.uint8)
            return jnp.where(is_code(bits.ndim), bits, 0x28 + (bits & 15))

        def change(x):
            layer = jnp.arange(count, dtype=jnp.uint8).reshape(1, count, *[1] * len(shape)) * 37
            return x[:, None] ^ jnp.where(is_code(x.ndim + 1), layer, 0)

        return make(name, change, make(name, draw, next(keys)))

    beta = 0.16
    gates = jnp.array([math.sqrt(1 - beta**2), beta] * 2, jnp.float32)[None, :, None]
    return {
        "embed": make("embed", normal((ranks, v, h), 1.0), next(keys)),
        "qkvu": per_layer("qkvu", layers, ((2 * q + 2 * kv) // 16, h // 16, 256), 1 / math.sqrt(h)),
        "o": per_layer("o", layers, (h // 16, q // 16, 256), 1 / math.sqrt(8 * q)),
        "router": per_layer("router", layers, (e // 8, h), 0.1, jnp.float32),
        "pre_expert": per_layer("pre_expert", layers, (m // 8 // 16, h // 16, 256), 1 / math.sqrt(h)),
        "post_expert": per_layer("post_expert", layers, (h // 16, m // 8 // 16, 256), 1 / math.sqrt(m)),
        "w13_bf16": per_layer("w13_bf16", plain, (e, *w13, 256), 1 / math.sqrt(m)),
        "w2_bf16": per_layer("w2_bf16", plain, (e, *w2, 256), 1 / math.sqrt(i)),
        "w13_fp4": panels("w13_fp4", quantised, (e, w13[0], SEGMENTS, panel_count(m), PANEL_BYTES)),
        "w2_fp4": panels("w2_fp4", quantised, (e, w2[0], SEGMENTS, panel_count(i), PANEL_BYTES)),
        "lm_head": make("lm_head", normal((ranks, -(-v // 16), h // 16, 256), 0.5 / math.sqrt(h)), next(keys)),
        "hidden_gains": make("hidden_gains", normal((layers, 3, h), 0.2, 1.0), next(keys)),
        "moe_gains": make("moe_gains", normal((layers, 2, m), 0.2, 1.0), next(keys)),
        "final_gain": make("final_gain", normal((h,), 0.2, 1.0), next(keys)),
        "gates": make("gates", lambda: jnp.broadcast_to(gates, (layers, 4, h))),
        "router_bias": make("router_bias", normal((layers, e), 0.1, dtype=jnp.float32), next(keys)),
        "scale_2": make("scale_2", lambda: jnp.full((layers, e, 3), 1 / 64, jnp.float32)),
        "input_scales": make("input_scales", lambda: jnp.full((layers, 2), 1 / 64, jnp.float32)),
    }


def random_decode_weights(config: MuseSparkConfig, mesh, seed: int = 0) -> DecodeWeights:
    """All eight ranks of released_arrays as DecodeWeights."""
    return DecodeWeights(
        **released_arrays(config, mesh, seed=seed), ranks=ranks_array(mesh, seed), config=config, mesh=mesh,
        communicator=Communicator(config, mesh),
    )  # fmt: skip


def on_mesh(weights: DecodeWeights, mesh) -> DecodeWeights:
    """The same bits on another mesh, by way of the host."""
    import numpy as np

    arrays = {
        name: jax.device_put(np.asarray(getattr(weights, name)), NamedSharding(mesh, spec))
        for name, spec in SPECS.items()
    }
    return dataclasses.replace(weights, **arrays, mesh=mesh, communicator=Communicator(weights.config, mesh))
