"""Packing for the fused step only moves bits: the inverse, written here from its documentation, gives them back."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from decode_helpers import FULL, SLIDING, drawn, make_model, quantised, random_bits, small
from op_helpers import same
from oracle import norms
from oracle.elementary import sigmoid
from oracle.formats import bfloat16, pack_nibbles

from muse_jax import ops
from muse_jax.decode.weights import RANK, SPECS
from muse_jax.mesh import make_mesh
from muse_jax.weights import random_params
from muse_jax.weights import repack as repack_module
from muse_jax.weights.repack import repack

# Element i of a bf16 tile: lane i // 8 = 4g + t, and in it (g; 2t, 2t+1), (g+8; 2t, 2t+1), (g; 2t+8, 2t+9),
# (g+8; 2t+8, 2t+9).
_LANE, _AT = np.divmod(np.arange(256), 8)
_G, _T = np.divmod(_LANE, 4)
ROW = _G + np.array([0, 0, 8, 8, 0, 0, 8, 8])[_AT]
COLUMN = 2 * _T + np.array([0, 1, 0, 1, 8, 9, 8, 9])[_AT]


def raw(x) -> np.ndarray:
    """The bits, as unsigned integers."""
    x = np.asarray(x)
    return x.view({1: np.uint8, 2: np.uint16, 4: np.uint32}[x.dtype.itemsize])


# The inverse ---------------------------------------------------------------------------------------------------------


def matrix(tiles: np.ndarray) -> np.ndarray:
    """[..., N/16, K/16, 256] -> [..., N, K]."""
    *lead, n, k, _ = tiles.shape
    out = np.empty((*lead, n, 16, k, 16), tiles.dtype)
    for i in range(256):
        out[..., ROW[i], :, COLUMN[i]] = tiles[..., i]
    return out.reshape(*lead, 16 * n, 16 * k)


# Bytes of a panel, by block: the words of its lanes and the scales of its rows.
_BLOCK = np.arange(8)[:, None]
WORD = ((_BLOCK // 4) * 32 + np.arange(32)) * 16 + (_BLOCK % 4) * 4
SCALE = 1024 + (np.arange(16) % 8) * 16 + _BLOCK * 2 + np.arange(16) // 8


def blocks(panels: np.ndarray, k: int, at: np.ndarray) -> np.ndarray:
    """[..., 8 segments, panels, 1152] -> those bytes of every block, [..., K/16, len(at)]."""
    count = k // 128
    found = panels[..., at].reshape(*panels.shape[:-2], -1, at.shape[1])
    assert not found[..., count:, :].any()  # padding
    return found[..., :count, :].reshape(*panels.shape[:-3], k // 16, at.shape[1])


def codes(panels: np.ndarray, k: int) -> np.ndarray:
    """[..., N/16, 8 segments, panels, 1152] -> packed codes uint8 [..., N, K/2]."""
    words = np.stack([blocks(panels, k, WORD + i) for i in range(4)], axis=-1).view("<u4")[..., 0]
    out = np.empty((*words.shape, 8), np.uint8)
    for half in range(2):  # the low half has the first number of each pair
        bits = (words >> (16 * half)) & 0xFFFF
        for a, (sign, magnitude) in enumerate([(15, 9), (12, 6), (14, 3), (13, 0)]):
            out[..., 2 * a + half] = ((bits >> magnitude) & 7) | ((bits >> sign) & 1) << 3
    return pack_nibbles(matrix(out.reshape(*words.shape[:-1], 256)))


def scales(panels: np.ndarray, k: int) -> np.ndarray:
    """[..., N/16, 8 segments, panels, 1152] -> [..., N, K/16]."""
    tiles = np.moveaxis(blocks(panels, k, SCALE), -1, -2)
    return tiles.reshape(*tiles.shape[:-3], -1, tiles.shape[-1])


def rows_back(x: np.ndarray) -> np.ndarray:
    """[8, N/8, ...] -> [N, ...]."""
    return x.reshape(-1, *x.shape[2:])


def columns_back(x: np.ndarray) -> np.ndarray:
    """[8, N, K/8] -> [N, K]."""
    return np.concatenate(list(x), axis=1)


def gate_up_back(x: np.ndarray) -> np.ndarray:
    """[8, E, 2I/8, C], 16 gate rows and 16 up rows alternating -> [E, 2I, C], gate rows first."""
    halves = []
    for which in (0, 1):
        groups = [share[:, i : i + 16] for share in x for i in range(16 * which, x.shape[2], 32)]
        halves.append(np.concatenate(groups, axis=1))
    return np.concatenate(halves, axis=1)


def down_back(x: np.ndarray) -> np.ndarray:
    """[8, E, M/8, C] -> [E, M, C]."""
    return np.concatenate(list(x), axis=1)


def unpacked(config, weights) -> dict[str, np.ndarray]:
    """The bits of every parameter that the packed form holds unchanged, by name."""
    w = {name: raw(getattr(weights, name)) for name in SPECS}
    heads, kv = config.num_attention_heads * 8, config.num_key_value_heads * 8  # rows of a rank
    head = matrix(w["lm_head"])
    assert not head[:, config.vocab_size // 8 :].any()  # padding
    out = {
        "embed_tokens.weight": rows_back(w["embed"]),
        "norm.weight": w["final_gain"],
        "lm_head.weight": rows_back(head[:, : config.vocab_size // 8]),
    }
    count = {"bf16": 0, "nvfp4": 0}
    for i, kind in enumerate(config.expert_formats):
        layer = f"layers.{i}."
        qkvu = matrix(w["qkvu"][:, i])
        for name, part in zip(("q", "k", "v", "gate"), np.split(qkvu, np.cumsum([heads, kv, kv]), axis=1), strict=True):
            out[f"{layer}self_attn.{name}_proj.weight"] = rows_back(part)
        out[f"{layer}self_attn.o_proj.weight"] = columns_back(matrix(w["o"][:, i]))
        out[f"{layer}mlp.gate.weight"] = rows_back(w["router"][:, i])
        out[f"{layer}mlp.gate.e_score_correction_bias"] = w["router_bias"][i]
        out[f"{layer}mlp.pre_expert_proj.weight"] = rows_back(matrix(w["pre_expert"][:, i]))
        out[f"{layer}mlp.post_expert_proj.weight"] = columns_back(matrix(w["post_expert"][:, i]))
        at, experts = count[kind], f"{layer}mlp.experts."
        count[kind] += 1
        if kind == "bf16":
            out[experts + "gate_up_proj"] = gate_up_back(matrix(w["w13_bf16"][:, at]))
            out[experts + "down_proj"] = down_back(matrix(w["w2_bf16"][:, at]))
        else:
            w13, w2 = (w["w13_fp4"][:, at], config.moe_hidden_size), (w["w2_fp4"][:, at], config.moe_intermediate_size)
            out[experts + "gate_up_proj"] = gate_up_back(codes(*w13))
            out[experts + "gate_up_proj_weight_scale"] = gate_up_back(scales(*w13))
            out[experts + "gate_up_proj_weight_scale_2"] = w["scale_2"][i][:, :2]
            out[experts + "down_proj"] = down_back(codes(*w2))
            out[experts + "down_proj_weight_scale"] = down_back(scales(*w2))
            out[experts + "down_proj_weight_scale_2"] = w["scale_2"][i][:, 2]
    stacks = {"bf16": ("w13_bf16", "w2_bf16"), "nvfp4": ("w13_fp4", "w2_fp4")}
    for kind, names in stacks.items():
        for name in names:
            assert w[name].shape[1] == max(count[kind], 1)
            assert count[kind] or not w[name].any()
    return out


def assert_same_bits(got: dict, params: dict) -> None:
    wrong = []
    for name, bits in got.items():
        try:
            same(bits, raw(params[name]))
        except AssertionError as error:
            wrong.append(f"{name}: {error}")
    assert not wrong, "\n".join(wrong)


# Weights that only move ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(61, 66))
def test_everything_comes_back(seed):
    """Every parameter but the norms' and gates' weights, from random bits, on 1, 2, 4 and 8 devices in turn."""
    config, mesh = drawn(seed), make_mesh((1, 2, 4, 8, 8)[seed % 5])
    params = random_bits(config, seed, mesh)
    check_everything(config, params, mesh)


@pytest.mark.parametrize("devices", [1, 8])
def test_panels_come_back(devices):
    """Segments of one full panel, and of two of which one block of the second is in use."""
    config = small(expert_formats=("nvfp4",) * 2, moe_hidden_size=1024, moe_intermediate_size=1152)
    mesh = make_mesh(devices)
    check_everything(config, random_bits(config, 60, mesh), mesh)


def check_everything(config, params, mesh) -> None:
    got = unpacked(config, repack(config, params, mesh))
    # What the packed form holds in another form: gains, gate coefficients, and of the input scales only the largest.
    other = ("layernorm.weight", "expert_norm.weight", "residual_gate.gate", "_input_scale")
    assert got.keys() == {name for name in params if not name.endswith(other)}
    assert_same_bits(got, params)


def test_tiles_are_as_documented():
    """By hand: lane 4g + t of the only tile of a 16 x 16 matrix."""
    w = jnp.arange(256, dtype=jnp.float32).reshape(16, 16)
    tile = np.asarray(repack_module.fragments(w)).reshape(32, 8)
    for g, t in ((0, 0), (0, 3), (7, 1)):
        rows, columns = (g, g, g + 8, g + 8) * 2, (2 * t, 2 * t + 1) * 2 + (2 * t + 8, 2 * t + 9) * 2
        assert tile[4 * g + t].tolist() == [16 * r + c for r, c in zip(rows, columns, strict=True)]
    number = np.zeros((16, 16), np.uint8)
    number[3, [2, 3]] = 0b1101, 0b0110  # lane 13, register 0: sign bit 15 and magnitude bits 11 to 9
    word = np.asarray(repack_module.code_fragments(jnp.asarray(pack_nibbles(number))))[0, 0]
    assert word[13] == (1 << 15 | 0b101 << 9) | (0b110 << 9) << 16
    assert np.count_nonzero(word) == 1


def test_panels_are_as_documented():
    """By hand: two codes and two scales of a 32 x 1152 matrix, whose segments have nine blocks."""
    number, scale = np.zeros((32, 1152), np.uint8), np.zeros((32, 72), np.uint8)
    number[16 + 3, 144 * 2 + 16 * 6 + 2] = 0b1101  # second group, third segment, its block 6, lane 13 as above
    scale[16 + 11, 9 * 2 + 6] = 0x7F
    number[5, 144 + 128 + 1] = 1  # first group, second segment, block 0 of its second panel, lane 20, high half
    scale[5, 9 + 8] = 0x80
    got = np.asarray(repack_module.panels(jnp.asarray(pack_nibbles(number)), jnp.asarray(scale)))
    assert got.shape == (2, 8, 2, 1152)
    word = (32 + 13) * 16 + 2 * 4
    want = np.zeros_like(got)
    want[1, 2, 0, word + 1] = (1 << 15 | 0b101 << 9) >> 8
    want[1, 2, 0, 1024 + 3 * 16 + 6 * 2 + 1] = 0x7F
    want[0, 1, 1, 20 * 16 + 3] = 1 << 9 >> 8
    want[0, 1, 1, 1024 + 5 * 16] = 0x80
    assert np.array_equal(got, want)


@pytest.mark.parametrize("devices", [1, 4])
def test_every_mesh_holds_the_same(devices):
    """The same arrays, of which a device has the share of its ranks."""
    config = small(num_hidden_layers=3, layer_types=(FULL,) * 3, layer_rope_theta=(0.0,) * 3,
                   expert_formats=("bf16", "nvfp4", "bf16"))  # fmt: skip
    want = repack(config, random_params(config, 3, make_mesh(8), quantized=True), make_mesh(8))
    mesh = make_mesh(devices)
    got = repack(config, random_params(config, 3, mesh, quantized=True), mesh)
    for name, spec in SPECS.items():
        array = getattr(got, name)
        if name == "ranks":  # holds a number of the packing, which is never the same
            assert np.array_equal(np.asarray(array)[:, 0], range(8))
        else:
            same(array, getattr(want, name))
        for d, device in enumerate(mesh.devices.flat):
            (shard,) = [s for s in array.addressable_shards if s.device == device]
            count = 8 // devices
            whole = np.asarray(array)
            same(shard.data, whole[d * count : (d + 1) * count] if spec == RANK else whole)


# Weights that are computed with --------------------------------------------------------------------------------------


def test_gains_of_all_finite_numbers():
    """R(1 + w) as the contract has it, compiled as repack compiles it."""
    bits = np.arange(2**16, dtype=np.uint16)
    w = bits[(bits & 0x7F80) != 0x7F80].view(bfloat16)
    want = norms.gain(w).astype(bfloat16)
    same(jax.jit(repack_module._gain)(w), want)
    same(jax.jit(lambda w: jnp.stack([repack_module._gain(x) for x in (w, w)]))(w)[1], want)


@functools.cache
def computed(seed: int):
    """A model whose norm and gate weights are any finite numbers."""
    config = small(num_hidden_layers=4, layer_types=(FULL, SLIDING) * 2, layer_rope_theta=(0.0,) * 4, hidden_size=256,
                   moe_hidden_size=384, expert_formats=("nvfp4",) * 3 + ("bf16",))  # fmt: skip
    mesh = make_mesh(8)
    rng = np.random.default_rng(seed)
    params = dict(random_params(config, seed, mesh, quantized=True))
    for name, array in params.items():
        if array.ndim == 1 and array.dtype == ml_dtypes.bfloat16:
            bits = rng.integers(0, 2**16, array.shape, dtype=np.uint16)
            finite = np.where((bits & 0x7F80) == 0x7F80, bits & 0xBFFF, bits).view(bfloat16)
            params[name] = jax.device_put(finite, array.sharding)
    return config, {n: np.asarray(a) for n, a in params.items()}, repack(config, params, mesh)


@pytest.mark.parametrize("seed", [0, 1])
def test_gains(seed):
    config, params, weights = computed(seed)
    hidden = ("input_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm")
    moe = ("mlp.pre_expert_norm", "mlp.experts.post_expert_norm")
    for i in range(config.num_hidden_layers):
        for names, array in ((hidden, weights.hidden_gains), (moe, weights.moe_gains)):
            for j, name in enumerate(names):
                gain = norms.gain(params[f"layers.{i}.{name}.weight"]).astype(bfloat16)
                same(np.asarray(array)[i, j], gain)
    same(weights.final_gain, params["norm.weight"])


@pytest.mark.parametrize("seed", [0, 1])
def test_gate_coefficients(seed):
    config, params, weights = computed(seed)
    for i in range(config.num_hidden_layers):
        for j, name in enumerate(("post_attention_residual_gate", "post_feedforward_residual_gate")):
            with np.errstate(all="ignore"):
                gate = params[f"layers.{i}.{name}.gate"].astype(np.float32)
                z = gate / np.float32(config.residual_gate_temperature)
                beta = sigmoid(z)
                alpha = np.sqrt(np.maximum(sigmoid(-z) * (np.float32(1) + beta), np.float32(1e-3)))
            same(np.asarray(weights.gates)[i, 2 * j], alpha)
            same(np.asarray(weights.gates)[i, 2 * j + 1], beta)


def test_scales_of_layers():
    """The largest input scale of a layer's experts, each GEMM for itself; ones where there are none."""
    config, params, weights = computed(0)
    for i, kind in enumerate(config.expert_formats):
        experts = f"layers.{i}.mlp.experts."
        if kind == "bf16":
            same(np.asarray(weights.input_scales)[i], np.ones(2, np.float32))
            same(np.asarray(weights.scale_2)[i], np.ones((config.num_local_experts, 3), np.float32))
            continue
        scales = [params[f"{experts}{name}_input_scale"] for name in ("gate_up_proj", "down_proj")]
        assert all(s.max() > s.min() for s in scales)
        same(np.asarray(weights.input_scales)[i], np.array([s.max() for s in scales], np.float32))


@pytest.mark.parametrize("devices", [1, 8])
def test_masters_are_quantised(devices):
    """As by ops.quantize_weight and by the oracle: gate, up and down of each expert for itself; input scales are 1."""
    config = small(expert_formats=("nvfp4", "bf16"), moe_intermediate_size=256)
    model = make_model(config, 9, devices, quantized=False)
    host = {name: np.asarray(a) for name, a in model.params.items()}
    got = unpacked(config, model.weights)
    want = quantised(config, host)
    prefix = "layers.0.mlp.experts."
    names = [n for n in want if n.startswith(prefix + "gate_up") or n.startswith(prefix + "down")]
    assert len(names) == 6
    assert_same_bits({n: got[n] for n in names}, want)
    assert_same_bits({n: got[n] for n in got if n not in names}, host)
    same(np.asarray(model.weights.input_scales)[0], np.ones(2, np.float32))

    down_codes, down_scales, down_scale_2 = ops.quantize_weight(model.params[prefix + "down_proj"])
    by_op = {"": down_codes, "_weight_scale": down_scales, "_weight_scale_2": down_scale_2}
    assert_same_bits({f"{prefix}down_proj{s}": got[f"{prefix}down_proj{s}"] for s in by_op},
                     {f"{prefix}down_proj{s}": a for s, a in by_op.items()})  # fmt: skip


@pytest.mark.parametrize("devices", [1, 8])
def test_masters_that_are_not_finite_make_their_expert_nan(devices):
    config = small(expert_formats=("nvfp4", "bf16"))
    mesh = make_mesh(devices)
    params = dict(random_params(config, 9, mesh))
    name = "layers.0.mlp.experts.down_proj"
    array = np.array(params[name])
    array[3, 5, 7] = np.nan
    params[name] = jax.device_put(array, params[name].sharding)
    scale_2 = np.asarray(repack(config, params, mesh).scale_2)
    assert np.argwhere(np.isnan(scale_2)).tolist() == [[0, 3, 2]]


# The interface -------------------------------------------------------------------------------------------------------


def test_parameters_stay_as_they_are():
    config, mesh = small(), make_mesh(2)
    params = random_params(config, 4, mesh, quantized=True)
    before = {name: np.array(a) for name, a in params.items()}
    repack(config, params, mesh)
    assert params.keys() == before.keys()
    assert_same_bits({name: raw(a) for name, a in before.items()}, params)


def test_all_problems_are_listed():
    config, mesh = small(), make_mesh(1)
    params = dict(random_params(config, 4, mesh, quantized=True))
    del params["norm.weight"]
    params["layers.0.self_attn.q_proj.weight"] = jnp.zeros((8, 128), jnp.bfloat16)
    params["lm_head.weight"] = params["lm_head.weight"].astype(jnp.float32)
    params["spare"] = jnp.zeros(3)
    with pytest.raises(ValueError, match="cannot repack these parameters") as failure:
        repack(config, params, mesh)
    for part in ("norm.weight: missing", "layers.0.self_attn.q_proj.weight: expected bfloat16 [512, 128]",
                 "lm_head.weight: expected bfloat16 [64, 128], found float32", "spare: unexpected"):  # fmt: skip
        assert part in str(failure.value)
