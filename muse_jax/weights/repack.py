"""Training layout -> decode layout, in one jitted program that only moves data (and quantises masters).

The tile order is defined in `ffi/decode/layout.h`; the arrays in docs/architecture.md.
"""

import functools
import itertools
from collections.abc import Mapping

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from muse_jax import ops
from muse_jax.comm import Communicator
from muse_jax.config import MuseSparkConfig
from muse_jax.decode.weights import SPECS, DecodeWeights
from muse_jax.mesh import AXIS, RANKS, RANKS_SHAPE, check_mesh, make_mesh, ranks_array
from muse_jax.weights.names import check_params, parameter_specs

TILE = 16
SEGMENTS = 8  # of K, the contract's; not the ranks
PANEL_BLOCKS, PANEL_BYTES = 8, 1152
PANEL_CODES = 1024  # bytes of codes, before the scales
_packings = itertools.count(1)


def repack(
    config: MuseSparkConfig, params: Mapping[str, jax.Array], mesh: Mesh, communicator: Communicator | None = None
) -> DecodeWeights:
    """Pack parameters for the fused step.

    Args:
        config: the model.
        params: flat parameters (docs/architecture.md, "Parameters"); bf16 masters of NVFP4 layers are quantised.
        mesh: 1, 2, 4 or 8 devices.
        communicator: the one whose ranks will run the step; a new one by default.

    Returns:
        DecodeWeights on the mesh; `params` stay as they are.

    Raises:
        ValueError: a parameter is missing, unexpected, or has the wrong shape or dtype; all are listed.
    """
    mesh = check_mesh(mesh)
    _, problems = check_params(config, params)
    if problems:
        raise ValueError("cannot repack these parameters:\n  " + "\n  ".join(problems))
    return packed_weights(config, mesh, _compiled(config, mesh)(dict(params)), communicator)


def packed_weights(
    config: MuseSparkConfig, mesh: Mesh, arrays: Mapping[str, jax.Array], communicator: Communicator | None = None
) -> DecodeWeights:
    """DecodeWeights of arrays that are packed already, as a packing of its own."""
    communicator = Communicator(config, mesh) if communicator is None else communicator
    return DecodeWeights(
        **arrays, ranks=ranks_array(mesh, next(_packings)), config=config, mesh=mesh, communicator=communicator
    )


def decode_shapes(config: MuseSparkConfig) -> dict[str, jax.ShapeDtypeStruct]:
    """The arrays that `repack` makes for a model, by name: traced, so that nothing is computed or allocated."""
    params = {name: jax.ShapeDtypeStruct(spec.shape, spec.dtype) for name, spec in parameter_specs(config).items()}
    mesh = make_mesh(1)  # shapes are those of all ranks on any mesh
    shapes = jax.eval_shape(functools.partial(_pack, config, mesh), params)
    shapes["ranks"] = jax.ShapeDtypeStruct(RANKS_SHAPE, jnp.int32)
    return {name: shapes[name] for name in SPECS}


@functools.lru_cache(maxsize=16)
def _compiled(config: MuseSparkConfig, mesh: Mesh):
    return jax.jit(functools.partial(_pack, config, mesh), out_shardings=decode_shardings(mesh))


def decode_shardings(mesh: Mesh) -> dict[str, NamedSharding]:
    """Of the arrays of `repack`, by name."""
    return {name: NamedSharding(mesh, spec) for name, spec in SPECS.items() if name != "ranks"}


def fragments(w: jax.Array) -> jax.Array:
    """[..., N, K] -> [..., N/16, K/16, 256]: 16 x 16 tiles in the order of the A operand of mma.m16n8k16."""
    *lead, n, k = w.shape
    tiles = w.reshape(*lead, n // TILE, 2, 8, k // TILE, 2, 4, 2)  # row half, g | k half, t, pair
    at = len(lead)
    order = [at, at + 3, at + 2, at + 5, at + 4, at + 1, at + 6]  # tile row, tile k, g, t, k half, row half, pair
    return tiles.transpose(*range(at), *order).reshape(*lead, n // TILE, k // TILE, TILE * TILE)


def code_fragments(codes: jax.Array) -> jax.Array:
    """Packed NVFP4 codes uint8 [..., N, K/2] -> uint32 [..., N/16, K/16, 32], one word per lane of the tile."""
    nibbles = jnp.stack([codes & 15, codes >> 4], axis=-1).reshape(*codes.shape[:-1], -1)
    lanes = fragments(nibbles).astype(jnp.uint32)
    lanes = lanes.reshape(*lanes.shape[:-1], 32, 4, 2)  # lane, register, pair
    word = jnp.zeros(lanes.shape[:-2], jnp.uint32)
    for j, sign_bit in enumerate((15, 12, 14, 13)):
        for half in range(2):
            code = lanes[..., j, half]
            word |= (((code & 7) << (9 - 3 * j)) | ((code >> 3) << sign_bit)) << (16 * half)
    return word


def panel_count(k: int) -> int:
    """Panels of a segment of a GEMM over k."""
    return -(-k // (SEGMENTS * TILE * PANEL_BLOCKS))


def panels(codes: jax.Array, scales: jax.Array) -> jax.Array:
    """NVFP4 codes uint8 [..., N, K/2] and scales as bits [..., N, K/16] -> panels uint8 [..., N/16, 8, K/1024, 1152].

    A segment of other than a multiple of eight blocks is filled up with zeros.
    """
    *lead, n, blocks = scales.shape
    count, at = blocks // SEGMENTS, len(lead)
    shape = (*lead, n // TILE, SEGMENTS, panel_count(blocks * TILE))

    def fill(x: jax.Array, axis: int) -> jax.Array:
        return jnp.pad(x, [(0, -count % PANEL_BLOCKS if i == axis else 0) for i in range(x.ndim)])

    words = code_fragments(codes).reshape(*lead, n // TILE, SEGMENTS, count, 32)
    words = fill(words, at + 2).reshape(*shape, 2, 4, 32)  # block / 4, block % 4, lane
    code_bytes = lax.bitcast_convert_type(jnp.swapaxes(words, -1, -2), jnp.uint8)  # the low byte comes first
    halves = scales.reshape(*lead, n // TILE, 2, 8, SEGMENTS, count)  # row / 8, row % 8
    halves = fill(halves, at + 4).reshape(*lead, n // TILE, 2, 8, *shape[at + 1 :], PANEL_BLOCKS)
    order = [at, at + 3, at + 4, at + 2, at + 5, at + 1]  # group, segment, panel, row % 8, block, row / 8
    return jnp.concatenate(
        [
            code_bytes.reshape(*shape, PANEL_CODES),
            halves.transpose(*range(at), *order).reshape(*shape, PANEL_BYTES - PANEL_CODES),
        ],
        -1,
    )


def _gain(w: jax.Array) -> jax.Array:
    """R(1 + w) of a zero-centred norm weight; one addition and one rounding, exact on every backend."""
    return (1.0 + w.astype(jnp.float32)).astype(jnp.bfloat16)


def bits(x: jax.Array) -> jax.Array:
    """bf16 and fp8 as integers: XLA:CPU reshards small floats through fp32, which changes NaNs and subnormals."""
    unsigned = {1: jnp.uint8, 2: jnp.uint16}.get(x.dtype.itemsize)
    return x if unsigned is None else lax.bitcast_convert_type(x, unsigned)


def _row_shards(w: jax.Array) -> jax.Array:
    """[N, ...] -> [8, N/8, ...]: each rank's rows."""
    return bits(w).reshape(RANKS, w.shape[0] // RANKS, *w.shape[1:])


def _column_shards(w: jax.Array) -> jax.Array:
    """[N, K] -> [8, N, K/8]: each rank's columns, one segment of the contract's reduction."""
    return jnp.moveaxis(bits(w).reshape(w.shape[0], RANKS, w.shape[1] // RANKS), 1, 0)


def _w13_shards(w: jax.Array) -> jax.Array:
    """[E, 2I, C] (gate rows, then up rows) -> [8, E, 2I/8, C], 16 gate rows and 16 up rows alternating."""
    e, rows, c = w.shape
    inner = rows // 2 // RANKS
    split = bits(w).reshape(e, 2, RANKS, inner // TILE, TILE, c)
    return split.transpose(2, 0, 3, 1, 4, 5).reshape(RANKS, e, 2 * inner, c)


def _w2_shards(w: jax.Array) -> jax.Array:
    """[E, M, C] -> [8, E, M/8, C]."""
    e, m, c = w.shape
    return jnp.swapaxes(bits(w).reshape(e, RANKS, m // RANKS, c), 0, 1)


def quantize_masters(mesh: Mesh, gate_up: jax.Array, down: jax.Array) -> dict[str, jax.Array]:
    """bf16 masters [E, 2I, M], [E, M, I] -> a checkpoint's NVFP4 arrays by suffix; each rank quantises its own."""

    def local(gate_up: jax.Array, down: jax.Array):
        e, rows, m = gate_up.shape
        codes, scales, scale_2 = ops.quantize_weight(gate_up.reshape(2 * e, rows // 2, m))
        up = (codes.reshape(e, rows, m // 2), scales.reshape(e, rows, m // TILE), scale_2.reshape(e, 2))
        return up, ops.quantize_weight(down)

    rank = PartitionSpec(AXIS)
    up, dn = jax.shard_map(local, mesh=mesh, in_specs=rank, out_specs=rank, check_vma=False)(gate_up, down)
    suffixes = ("", "_weight_scale", "_weight_scale_2")
    return {"gate_up_proj" + s: a for s, a in zip(suffixes, up, strict=True)} | {
        "down_proj" + s: a for s, a in zip(suffixes, dn, strict=True)
    }


def _experts(config: MuseSparkConfig, mesh: Mesh, params: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
    layers, experts = config.num_hidden_layers, config.num_local_experts
    m, i = config.moe_hidden_size, config.moe_intermediate_size
    out: dict[str, list[jax.Array]] = {name: [] for name in ("w13_bf16", "w2_bf16", "w13_fp4", "w2_fp4")}
    scale_2, input_scales = [], []
    for layer in range(layers):
        prefix = f"layers.{layer}.mlp.experts."
        own = {name.removeprefix(prefix): a for name, a in params.items() if name.startswith(prefix)}
        if config.expert_formats[layer] == "bf16":
            out["w13_bf16"].append(fragments(_w13_shards(own["gate_up_proj"])))
            out["w2_bf16"].append(fragments(_w2_shards(own["down_proj"])))
            scale_2.append(jnp.ones((experts, 3), jnp.float32))
            input_scales.append(jnp.ones(2, jnp.float32))
            continue
        if own["gate_up_proj"].dtype != jnp.uint8:
            own |= quantize_masters(mesh, own["gate_up_proj"], own["down_proj"])
        out["w13_fp4"].append(panels(*(_w13_shards(own["gate_up_proj" + s]) for s in ("", "_weight_scale"))))
        out["w2_fp4"].append(panels(*(_w2_shards(own["down_proj" + s]) for s in ("", "_weight_scale"))))
        scale_2.append(
            jnp.concatenate([own["gate_up_proj_weight_scale_2"], own["down_proj_weight_scale_2"][:, None]], 1)
        )
        one = jnp.ones(1, jnp.float32)
        input_scales.append(
            jnp.stack([jnp.max(own.get(f"{w}_input_scale", one)) for w in ("gate_up_proj", "down_proj")])
        )
    # A kind that no layer has keeps one zero layer, because XLA passes no pointer for an empty buffer.
    w13, w2 = 2 * i // RANKS // TILE, m // RANKS // TILE
    empty = {
        "w13_bf16": ((w13, m // TILE, 256), jnp.uint16),
        "w2_bf16": ((w2, i // TILE, 256), jnp.uint16),
        "w13_fp4": ((w13, SEGMENTS, panel_count(m), PANEL_BYTES), jnp.uint8),
        "w2_fp4": ((w2, SEGMENTS, panel_count(i), PANEL_BYTES), jnp.uint8),
    }
    stacked = {
        name: jnp.stack(arrays, 1) if arrays else jnp.zeros((RANKS, 1, experts, *empty[name][0]), empty[name][1])
        for name, arrays in out.items()
    }
    return stacked | {"scale_2": jnp.stack(scale_2), "input_scales": jnp.stack(input_scales)}


def _pack(config: MuseSparkConfig, mesh: Mesh, params: dict[str, jax.Array]) -> dict[str, jax.Array]:
    return pack_layers(config, mesh, params) | pack_ends(mesh, params)


def pack_ends(mesh: Mesh, params: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
    """The decode arrays of what lies before and behind the layers, by name; of those parameters that are given."""
    packed = {}
    if "embed_tokens.weight" in params:
        packed["embed"] = _row_shards(params["embed_tokens.weight"])
    if "norm.weight" in params:
        packed["final_gain"] = params["norm.weight"]
    if "lm_head.weight" in params:
        head = _row_shards(params["lm_head.weight"])
        # Not jnp.pad: XLA:CPU fuses its select with the final bitcast and converts through fp32, flushing subnormals.
        rows = jnp.arange(head.shape[1] + -head.shape[1] % TILE)
        inside = (rows < head.shape[1]).astype(head.dtype)
        head = jnp.take(head, jnp.minimum(rows, head.shape[1] - 1), axis=1) * inside[None, :, None]
        packed["lm_head"] = fragments(head)
    return _placed(mesh, packed)


def pack_layers(config: MuseSparkConfig, mesh: Mesh, params: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
    """The decode arrays of all layers, by name."""
    layers = range(config.num_hidden_layers)

    def each(name: str) -> list[jax.Array]:
        return [params[f"layers.{i}.{name}"] for i in layers]

    def stack(pack, *names: str) -> jax.Array:
        """Packed per layer with the rank axis leading, stacked over layers behind it."""
        return jnp.stack([pack(*ws) for ws in zip(*(each(n) for n in names), strict=True)], axis=1)

    def gains(*names: str) -> jax.Array:
        return jnp.stack([jnp.stack([_gain(w) for w in each(n)]) for n in names], axis=1)

    def coefficients(name: str) -> jax.Array:
        gate = jnp.stack(each(name))
        alpha, beta = ops.gate_coefficients(gate.reshape(-1), temperature=config.residual_gate_temperature)
        return jnp.stack([alpha.reshape(gate.shape), beta.reshape(gate.shape)], axis=1)

    def qkvu(*ws: jax.Array) -> jax.Array:
        return fragments(jnp.concatenate([_row_shards(w) for w in ws], axis=1))

    attention = [f"self_attn.{n}_proj.weight" for n in ("q", "k", "v", "gate")]
    packed = {
        "hidden_gains": gains(
            "input_layernorm.weight", "pre_feedforward_layernorm.weight", "post_feedforward_layernorm.weight"
        ),
        "moe_gains": gains("mlp.pre_expert_norm.weight", "mlp.experts.post_expert_norm.weight"),
        "gates": jnp.concatenate(
            [coefficients("post_attention_residual_gate.gate"), coefficients("post_feedforward_residual_gate.gate")], 1
        ),
        "qkvu": stack(qkvu, *attention),
        "o": stack(lambda w: fragments(_column_shards(w)), "self_attn.o_proj.weight"),
        "router": stack(_row_shards, "mlp.gate.weight"),
        "router_bias": jnp.stack(each("mlp.gate.e_score_correction_bias")),
        "pre_expert": stack(lambda w: fragments(_row_shards(w)), "mlp.pre_expert_proj.weight"),
        "post_expert": stack(lambda w: fragments(_column_shards(w)), "mlp.post_expert_proj.weight"),
        **_experts(config, mesh, params),
    }
    return _placed(mesh, packed)


def _placed(mesh: Mesh, packed: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """Resharded as integers; then bf16 is called what it is."""
    for name, x in packed.items():
        x = lax.with_sharding_constraint(x, NamedSharding(mesh, SPECS[name]))
        packed[name] = lax.bitcast_convert_type(x, jnp.bfloat16) if x.dtype == jnp.uint16 else x
    return packed
