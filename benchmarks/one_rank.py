"""One rank of eight at the released shapes on one GPU: it computes, reads and stores what it would among eight.

Its peers' slots are fed by itself (a loopback communicator), so that no exchange waits for anybody; the text is
meaningless. All layers have their own weights, made on the device.
"""

import dataclasses
import importlib
import math

import jax
import jax.numpy as jnp
import numpy as np
from released import released_arrays

from muse_jax import MuseSparkConfig, decode, make_mesh
from muse_jax.comm import Communicator
from muse_jax.decode import DecodeState, DecodeWeights
from muse_jax.decode.state import layer_kinds, ring_slots


class Loopback(Communicator):
    """Rank 0 of eight on the mesh's one device, alone."""

    def __init__(self, config: MuseSparkConfig, mesh):
        """Allocate and preload on the mesh's device."""
        self._config, self._mesh = config, mesh
        device = next(iter(mesh.devices.flat)).local_hardware_id
        cuda = importlib.import_module("muse_jax._cuda")
        self.key = cuda.create_communicator([device, *[-1] * 7], self.sizes(config), loopback=True)


def one_rank(config: MuseSparkConfig, device) -> DecodeWeights:
    """The weights of rank 0, leading axis 1."""
    mesh = make_mesh([device])
    arrays = released_arrays(config, mesh, ranks=1)
    # Small router weights: a row's own scores then decide among the candidates that `routing` leaves.
    arrays["router"] = arrays["router"] * jnp.float32(0.16)
    return DecodeWeights(
        **arrays,
        ranks=jax.device_put(np.zeros((1, 2), np.int32), arrays["router"].sharding),
        config=config,
        mesh=mesh,
        communicator=Loopback(config, mesh),
    )


def one_rank_state(weights: DecodeWeights, context: int, capacity: int) -> DecodeState:
    """Caches of rank 0 with `context` committed positions of random K and V."""
    config, device = weights.config, next(iter(weights.mesh.devices.flat))
    full, sliding = layer_kinds(config)
    heads, ring = config.num_key_value_heads // 8, ring_slots(config.sliding_window)
    # For all but the caches: one layer, so that eight ranks' caches do not fill the memory first.
    one_layer = config.replace(
        num_hidden_layers=1, layer_types=("sliding_attention",), layer_rope_theta=(config.rope_theta,),
        expert_formats=config.expert_formats[:1],
    )  # fmt: skip
    small = decode.init_state(one_layer, weights.mesh, capacity=capacity)

    def random(seed, shape):
        def make(key):
            bits = jax.random.bits(key, shape, jnp.uint16)
            return jax.lax.bitcast_convert_type((bits & 0x80FF) | 0x3F00, jnp.bfloat16)  # magnitudes 0.5 to 2

        return jax.jit(make, device=device)(jax.random.key(seed))

    shapes = [(1, max(full, 1), 1, heads, capacity, 64), (1, max(sliding, 1), 1, heads, ring, 64)]
    k_full, v_full, k_ring, v_ring = (random(i, shapes[i // 2]) for i in range(4))
    lengths = jax.device_put(np.full(1, context, np.int32), small.lengths.sharding)
    return dataclasses.replace(
        small, k_full=k_full, v_full=v_full, k_ring=k_ring, v_ring=v_ring, lengths=lengths, config=config
    )


def routing(config: MuseSparkConfig, candidates: int, steps: int, overlap: float, seed: int = 0) -> np.ndarray:
    """Router biases fp32 [steps, L, E] that leave `candidates` experts to choose from, per layer and step.

    From step to step `overlap` of a layer's candidates stay; the rest is drawn anew.
    """
    rng = np.random.default_rng(seed)
    layers, experts = config.num_hidden_layers, config.num_local_experts
    bias = np.full((steps, layers, experts), -1e4, np.float32)
    chosen = np.stack([rng.permutation(experts) for _ in range(layers)])
    for step in range(steps):
        for layer in range(layers):
            bias[step, layer, chosen[layer, :candidates]] = rng.random(candidates) * 0.05
            keep = rng.permutation(candidates)[: math.floor(overlap * candidates)]
            kept = chosen[layer, keep]
            rest = rng.permutation(np.setdiff1d(chosen[layer, candidates:], kept))
            order = np.concatenate([kept, rest[: candidates - len(kept)]])
            chosen[layer] = np.concatenate([order, np.setdiff1d(np.arange(experts), order)])
    return bias


def rank_bytes(config: MuseSparkConfig, distinct: np.ndarray, context: int, rows: int) -> dict[str, float]:
    """Bytes that a step of one rank must read, by kind; distinct experts per layer [L]."""
    h, m, i, v = config.hidden_size, config.moe_hidden_size, config.moe_intermediate_size, config.vocab_size
    q, kv, layers = config.attention_size // 8, config.num_key_value_heads * 8, config.num_hidden_layers
    nvfp4 = np.array([f == "nvfp4" for f in config.expert_formats])
    expert = np.where(nvfp4, 9 / 16, 2.0) * 3 * m * i / 8
    seen = [context if t == "full_attention" else min(context, config.sliding_window) for t in config.layer_types]
    return {
        "dense": layers * (2 * (h * (2 * q + 2 * kv) + h * q + 2 * h * m // 8) + 4 * config.num_local_experts // 8 * h),
        "experts": float((distinct * expert).sum()),
        "KV": sum(seen) * config.num_key_value_heads // 8 * 64 * 4,
        "head": 2 * h * v // 8 + 4 * rows * v // 8,
    }
