"""DecodeWeights: the model's weights as the fused step reads them (docs/architecture.md, "The fused step")."""

import dataclasses

import jax
from jax.sharding import Mesh, PartitionSpec

from muse_jax.comm import Communicator, Session
from muse_jax.config import MuseSparkConfig
from muse_jax.mesh import AXIS

RANK = PartitionSpec(AXIS)
REPLICATED = PartitionSpec()


@dataclasses.dataclass(frozen=True)
class DecodeWeights:
    """Packed weights. Rank-sharded arrays lead with 8 ranks; a kind of expert that no layer has keeps one zero layer.

    Made by `muse_jax.weights.repack`; a pytree whose static part is the configuration and the mesh.
    """

    embed: jax.Array
    """bf16 [8, V/8, H]."""
    hidden_gains: jax.Array
    """bf16 [L, 3, H], replicated: R(1+w) of input, pre-FFN and post-FFN norm."""
    moe_gains: jax.Array
    """bf16 [L, 2, M], replicated: R(1+w) of pre-expert and post-expert norm."""
    gates: jax.Array
    """fp32 [L, 4, H], replicated: alpha, beta after attention; alpha, beta after the MoE."""
    qkvu: jax.Array
    """bf16 fragments [8, L, rows/16, H/16, 256]."""
    o: jax.Array
    """bf16 fragments [8, L, H/16, Nq*8/16, 256]."""
    router: jax.Array
    """fp32 [8, L, E/8, H]."""
    router_bias: jax.Array
    """fp32 [L, E], replicated."""
    pre_expert: jax.Array
    """bf16 fragments [8, L, M/8/16, H/16, 256]."""
    post_expert: jax.Array
    """bf16 fragments [8, L, H/16, M/8/16, 256]."""
    w13_bf16: jax.Array
    """bf16 fragments [8, Lb, E, 2I/8/16, M/16, 256]: 16 gate rows, 16 up rows, alternating."""
    w2_bf16: jax.Array
    """bf16 fragments [8, Lb, E, M/8/16, I/16, 256]."""
    w13_fp4: jax.Array
    """NVFP4 panels, uint8 [8, Lq, E, 2I/8/16, 8 segments, ceil(M/1024), 1152]: rows as in w13_bf16."""
    w2_fp4: jax.Array
    """NVFP4 panels, uint8 [8, Lq, E, M/8/16, 8 segments, ceil(I/1024), 1152]."""
    scale_2: jax.Array
    """fp32 [L, E, 3], replicated: gate, up and down weight_scale_2; 1 in bf16 layers."""
    input_scales: jax.Array
    """fp32 [L, 2], replicated: the largest input scale of the layer's experts, both GEMMs; 1 in bf16 layers."""
    final_gain: jax.Array
    """bf16 [H], replicated: the final norm's plain weight."""
    lm_head: jax.Array
    """bf16 fragments [8, ceil(V/8/16), H/16, 256], padded with zero rows."""
    ranks: jax.Array
    """int32 [8, 2], sharded: rank and a number of this packing (`muse_jax.mesh.ranks_array`)."""
    config: MuseSparkConfig = dataclasses.field(metadata={"static": True})
    mesh: Mesh = dataclasses.field(metadata={"static": True})
    communicator: Communicator = dataclasses.field(metadata={"static": True})


_REPLICATED = {"hidden_gains", "moe_gains", "gates", "router_bias", "scale_2", "input_scales", "final_gain"}

SPECS: dict[str, PartitionSpec] = {
    field.name: REPLICATED if field.name in _REPLICATED else RANK
    for field in dataclasses.fields(DecodeWeights)
    if "static" not in field.metadata
}
"""How each array lies on the mesh."""


def _flatten(weights: DecodeWeights):
    static = weights.config, weights.mesh, Session(weights.communicator.key, weights.communicator)
    return [getattr(weights, name) for name in SPECS], static


def _flatten_with_keys(weights: DecodeWeights):
    arrays, static = _flatten(weights)
    return list(zip(map(jax.tree_util.GetAttrKey, SPECS), arrays, strict=True)), static


def _unflatten(static, arrays) -> DecodeWeights:
    config, mesh, session = static
    return DecodeWeights(*arrays, config=config, mesh=mesh, communicator=session.communicator)


# Not register_dataclass: JAX would hold the communicator itself, whose key a rebuild changes.
jax.tree_util.register_pytree_with_keys(DecodeWeights, _flatten_with_keys, _unflatten, _flatten)
