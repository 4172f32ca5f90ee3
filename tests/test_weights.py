"""The table of names, random weights, and our own checkpoints."""

import json
import math
import pathlib
import re
import shutil
import zlib

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec
from oracle import formats
from orbax.checkpoint import v1 as ocp
from weight_helpers import SMALL, oracle_quantize_weight, same_bytes, tree, use_oracle_quantiser

from muse_jax import weights
from muse_jax.config import MuseSparkConfig
from muse_jax.errors import CheckpointError
from muse_jax.mesh import make_mesh
from muse_jax.tokenizer import byte_tokenizer, load_tokenizer
from muse_jax.weights import transfer, values
from muse_jax.weights.names import BF16, E4M3, FP32, U8, parameter_specs, stored_formats

BF16_LAYERS = ("bf16",) * 3


@pytest.fixture(scope="module")
def masters():
    return weights.random_params(SMALL, 3)


@pytest.fixture(scope="module")
def quantised():
    with pytest.MonkeyPatch.context() as patch:
        use_oracle_quantiser(patch)
        return weights.random_params(SMALL, 3, quantized=True)


def problems_of(function, *args, **kwargs) -> list[str]:
    with pytest.raises(CheckpointError) as caught:
        function(*args, **kwargs)
    return list(caught.value.problems)


# --- names ----------------------------------------------------------------------------------------------------------


def test_released_sizes():
    config = MuseSparkConfig.released()
    bf16 = parameter_specs(config, ("bf16",) * 62)
    assert len(bf16) == 62 * 18 + 3
    assert sum(math.prod(s.shape) for s in bf16.values()) == 819_990_552_064
    bytes_bf16 = sum(math.prod(s.shape) * s.dtype.itemsize for s in bf16.values())
    assert bytes_bf16 == 1_640_241_182_720
    nvfp4 = parameter_specs(config)
    bytes_nvfp4 = sum(math.prod(s.shape) * s.dtype.itemsize for s in nvfp4.values())
    assert bytes_nvfp4 == 528_918_763_520
    e = "layers.1.mlp.experts."
    assert [(nvfp4[e + n].shape, nvfp4[e + n].dtype) for n in (
        "gate_up_proj", "gate_up_proj_weight_scale", "gate_up_proj_weight_scale_2", "gate_up_proj_input_scale",
        "down_proj", "down_proj_weight_scale", "down_proj_weight_scale_2", "down_proj_input_scale",
    )] == [
        ((256, 8192, 2048), U8), ((256, 8192, 256), E4M3), ((256, 2), FP32), ((256, 2), FP32),
        ((256, 4096, 2048), U8), ((256, 4096, 256), E4M3), ((256,), FP32), ((256,), FP32),
    ]  # fmt: skip


def test_order_and_placement():
    specs = parameter_specs(SMALL)
    names = list(specs)
    assert names[0] == "embed_tokens.weight" and names[-2:] == ["norm.weight", "lm_head.weight"]
    layers = [int(n.split(".")[1]) for n in names[1:-2]]
    assert layers == sorted(layers)
    for name, spec in specs.items():
        expert = ".mlp.experts." in name and "norm" not in name
        assert spec.placement == ("expert" if expert else "replicated")
        assert spec.dtype == FP32 or ".mlp.gate." not in name


def test_stored_format_goes_by_dtype():
    assert stored_formats(SMALL, {}) == SMALL.expert_formats
    dtypes = {"layers.0.mlp.experts.gate_up_proj": U8, "layers.1.mlp.experts.down_proj": BF16}
    assert stored_formats(SMALL, dtypes) == ("nvfp4", "bf16", "bf16")


# --- random weights -------------------------------------------------------------------------------------------------


def test_random_weights_never_change(masters):
    """Goldens: the recipe is part of what users rely on. A change here is a change of every published tiny model."""
    digest = zlib.crc32(b"".join(np.asarray(array).tobytes() for array in masters.values()))
    assert f"{digest:08x}" == "71f9790c"


def test_the_recipe_in_plain_python(masters):
    raw = np.random.Philox(key=np.array([3, zlib.crc32(b"norm.weight")], np.uint64)).random_raw(128)
    for value, draw in zip(np.asarray(masters["norm.weight"]), map(int, raw), strict=True):
        total = sum((draw >> shift) & 0xFFFF for shift in (0, 16, 32, 48)) - 131070
        assert value == BF16.type(np.float32(total * (0.2 * (1 / math.sqrt((2**32 - 1) / 3))) + 1.0))


def test_random_weights_depend_on_seed_and_name_only(masters):
    assert same_bytes(masters, weights.random_params(SMALL, 3, make_mesh(2)))
    other = weights.random_params(SMALL, 4)
    assert not any(np.array_equal(masters[n], other[n]) for n in masters)
    assert not np.array_equal(masters["layers.0.input_layernorm.weight"], masters["layers.1.input_layernorm.weight"])
    deeper = SMALL.replace(
        num_hidden_layers=4, layer_types=(*SMALL.layer_types, "full_attention"),
        layer_rope_theta=(*SMALL.layer_rope_theta, 0), expert_formats=(*SMALL.expert_formats, "bf16"),
    )  # fmt: skip
    more = weights.random_params(deeper, 3)
    assert all(np.array_equal(masters[n], more[n]) for n in masters)


@pytest.mark.parametrize(
    ("name", "mean", "deviation"),
    [
        ("embed_tokens.weight", 0, 128**-0.5),
        ("lm_head.weight", 0, 0.5),
        ("norm.weight", 1, 0.2),
        ("layers.0.input_layernorm.weight", 0, 0.2),
        ("layers.0.mlp.experts.post_expert_norm.weight", 0, 0.2),
        ("layers.0.mlp.gate.weight", 0, 0.1),
        ("layers.0.self_attn.o_proj.weight", 0, 512**-0.5),
        ("layers.0.mlp.experts.down_proj", 0, (1.25 / 128) ** 0.5),
    ],
)
def test_distribution(masters, name, mean, deviation):
    array = np.asarray(masters[name], np.float64)
    error = 4 * deviation / math.sqrt(array.size if "experts.down" not in name else array[0].size)
    assert abs(array.mean() - mean) < error
    assert abs(array.std() - deviation) < error


def test_gates_reach_the_clamp(masters):
    gate = np.asarray(masters["layers.1.post_attention_residual_gate.gate"], np.float64)
    assert (gate[::97] == 3).all() and abs(np.delete(gate, np.s_[::97]).mean() + 0.5) < 0.1


def test_experts_are_relatives(masters):
    w = np.asarray(masters["layers.1.mlp.experts.gate_up_proj"], np.float64)
    assert 0.7 < np.corrcoef(w[0].ravel(), w[5].ravel())[0, 1] < 0.9


def test_quantised_weights_are_those_of_the_masters(masters, quantised):
    assert stored_formats(SMALL, {n: a.dtype for n, a in quantised.items()}) == SMALL.expert_formats
    assert list(quantised) == list(parameter_specs(SMALL))
    for proj, halves in (("gate_up_proj", 2), ("down_proj", 1)):
        name = f"layers.1.mlp.experts.{proj}"
        w = np.asarray(masters[name])
        # expert 6, last half, on its own
        half = w[6][(halves - 1) * w.shape[1] // halves :]
        codes, scales, scale_2 = oracle_quantize_weight(half[None])
        assert np.array_equal(np.asarray(quantised[name])[6, -half.shape[0] :], codes[0])
        found = np.asarray(quantised[name + "_weight_scale"])[6, -half.shape[0] :]
        assert found.tobytes() == scales[0].tobytes()
        assert np.asarray(quantised[name + "_weight_scale_2"]).reshape(8, halves)[6, -1] == scale_2[0]
        step = formats.e4m3_decode(scales[0].view(np.uint8)) * scale_2[0]
        assert step.shape == (half.shape[0], half.shape[1] // 16)
        input_scale = np.asarray(quantised[name + "_input_scale"])
        assert len(np.unique(input_scale)) > 1 and (input_scale >= 2**-7).all() and (input_scale < 2**-6).all()


def test_native_quantiser_agrees_with_the_oracle(quantised):
    pytest.importorskip("muse_jax.ops", exc_type=ImportError)
    assert same_bytes(quantised, weights.random_params(SMALL, 3, quantized=True))


def test_seed_range():
    with pytest.raises(ValueError, match=r"^seed: given -1, allowed: 0 to 2\*\*64 - 1$"):
        weights.random_params(SMALL, -1)


# --- values ---------------------------------------------------------------------------------------------------------


def problem_of(name, array):
    bad = values.bad_values(name, array)
    return None if bad is None else values.describe(name, [bad])


def test_value_problems(monkeypatch):
    monkeypatch.setattr(values, "_CHUNK", 7)  # so that chunk borders matter
    w = np.zeros((4, 5), BF16)
    assert problem_of("w", w) is None
    w[2, 1], w[3, 3] = np.inf, np.nan
    assert problem_of("w", w) == "expected finite numbers, found 2 other(s), the first one inf at [2, 1]"
    later, first = values.bad_values("w", w[3:], 3), values.bad_values("w", w[:3])  # in pieces, in whatever order
    assert later is not None and first is not None
    assert values.describe("w", [later, first]) == problem_of("w", w)
    scale = np.full((2, 3), 0x7E, np.uint8)
    assert problem_of("x_weight_scale", scale.view(E4M3)) is None
    scale[1, 0] = 0x81
    assert problem_of("x_weight_scale", scale.view(E4M3)) == (
        "expected block scales that are neither negative nor NaN, found 1 other(s), "
        "the first one -0.001953125 at [1, 0]"
    )
    scale_2 = np.array([0, -1, np.nan], np.float32)
    assert problem_of("x_weight_scale_2", scale_2) == (
        "expected scales that are finite and not negative, found 2 other(s), the first one -1.0 at [1]"
    )
    assert problem_of("x_input_scale", scale_2[:1]) == (
        "expected scales that are finite and above 0, found 1 other(s), the first one 0.0 at [0]"
    )
    assert problem_of("codes", np.arange(256, dtype=np.uint8)) is None


# --- our own checkpoints --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def saved(quantised, tmp_path_factory):
    path = tmp_path_factory.mktemp("orbax") / "model"
    weights.save(path, SMALL, quantised, byte_tokenizer())
    return path


@pytest.fixture
def copy(saved, tmp_path):
    return pathlib.Path(shutil.copytree(saved, tmp_path / "copy"))


@pytest.mark.parametrize("count", [1, 2, 4, 8])
def test_restore_onto_any_mesh(saved, quantised, count):
    mesh = make_mesh(count)
    config, params = weights.load(saved, mesh)
    assert config == SMALL and same_bytes(params, quantised)
    for name, spec in parameter_specs(SMALL).items():
        expected = PartitionSpec("rank") if spec.placement == "expert" else PartitionSpec()
        assert params[name].sharding.is_equivalent_to(jax.NamedSharding(mesh, expected), len(spec.shape))
        assert len(params[name].addressable_shards) == count
    assert load_tokenizer(saved).encode("a").ids == [97]


def test_masters_stay_masters(masters, tmp_path):
    weights.save(tmp_path / "m", SMALL, masters)
    config, params = weights.load(tmp_path / "m")
    assert config == SMALL and same_bytes(params, masters)
    assert not (tmp_path / "m" / "tokenizer.json").exists()


def test_overwriting_needs_permission(copy, quantised, masters):
    message = ["exists already; choose another name, remove it, or pass overwrite=True"]
    assert problems_of(weights.save, copy, SMALL, quantised) == message
    weights.save(copy, SMALL, masters, overwrite=True)
    assert same_bytes(weights.restore(copy)[1], masters)
    assert [p.name for p in copy.parent.iterdir()] == ["copy"]


def test_incomplete_parameters_are_not_saved(masters, tmp_path):
    bad = dict(masters)
    del bad["norm.weight"]
    bad["extra"] = bad["lm_head.weight"]
    bad["lm_head.weight"] = bad["lm_head.weight"].astype(np.float32)
    assert problems_of(weights.save, tmp_path / "m", SMALL, bad) == [
        "norm.weight: missing, expected bfloat16 [128]",
        "lm_head.weight: expected bfloat16 [64, 128], found float32 [64, 128]",
        "extra: unexpected, found bfloat16 [64, 128]",
    ]
    assert not (tmp_path / "m").exists()


def test_codes_need_the_format(quantised, tmp_path):
    config = SMALL.replace(expert_formats=BF16_LAYERS)
    assert problems_of(weights.save, tmp_path / "m", config, quantised) == [
        "layers.1.mlp.experts: NVFP4 weights, but expert_formats[1] is 'bf16'; set it to 'nvfp4'"
    ]


HELP = "copy the checkpoint again, or make it anew"


def test_orbax_reads_our_form(saved, quantised):
    """`params/` is an Orbax checkpoint, arrays and metadata."""
    mesh = make_mesh(8)
    wanted = {
        n: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=s.sharding(mesh)) for n, s in parameter_specs(SMALL).items()
    }
    found = ocp.load(str(saved / "params"), wanted)
    assert same_bytes({name: found[name] for name in quantised}, quantised)
    metadata = ocp.metadata(str(saved / "params")).metadata
    assert {n: (a.shape, a.dtype) for n, a in metadata.items()} == {n: (a.shape, a.dtype) for n, a in wanted.items()}


def test_equal_weights_give_equal_files(saved, quantised, tmp_path):
    """Whatever mesh they come from; pieces of several sizes, none across two ranks."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transfer, "PIECE_BYTES", 70_000)
        patch.setattr(transfer, "_WHOLE_BYTES", 1000)
        for count in (1, 8):
            mesh = make_mesh(count)
            placed = {n: jax.device_put(quantised[n], s.sharding(mesh)) for n, s in parameter_specs(SMALL).items()}
            weights.save(tmp_path / str(count), SMALL, placed, byte_tokenizer())
        trees = [tree(tmp_path / "1"), tree(tmp_path / "8")]
        assert trees[0] == trees[1] and len(trees[0]) > len(tree(saved)) + 30
        name = "params/state/layers.1.mlp.experts.gate_up_proj/"
        assert {n for n in trees[0] if n.startswith(name)} == {name + "zarr.json"} | {
            f"{name}c/{i}/0/0" for i in range(8)
        }
        assert name.replace("layers.1", "layers.0") + "c/7/0/0" in trees[0]
        assert {n for n in trees[0] if "o_proj.weight/c" in n} == {
            f"params/state/layers.{layer}.self_attn.o_proj.weight/c/{i}/0" for layer in range(3) for i in range(2)
        }
        assert same_bytes(weights.load(tmp_path / "8")[1], quantised)
        found = ocp.load(str(tmp_path / "8" / "params"), {n: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=a.sharding)
                                                          for n, a in quantised.items()})  # fmt: skip
        assert same_bytes({name: found[name] for name in quantised}, quantised)


def test_every_damaged_file_is_named(copy):
    """Flip, cut and remove each file of the Orbax checkpoint in turn; of the layers, those of one."""
    for file in [f for f in (copy / "params").rglob("*") if f.is_file() and not re.search(r"layers\.[02]", str(f))]:
        data, name = file.read_bytes(), str(file.relative_to(copy))
        file.unlink()
        gone = "No such file or directory; check the path and its permissions"
        assert problems_of(weights.restore, copy) == [
            f"{name}: {gone}" if file.name == "zarr.json" else f"{name}: missing; {HELP}"
        ]
        if data:
            file.write_bytes(data[:-1])
            (problem,) = problems_of(weights.restore, copy)
            if "/c/" in name:
                assert problem == f"{name}: expected {len(data)} bytes, found {len(data) - 1}; {HELP}"
            elif file.name == "zarr.json":
                assert problem.startswith(f"{name}: not valid JSON (")
            else:
                assert problem == f"{name}: the content has changed; {HELP}"
            file.write_bytes(bytes([*data[: len(data) // 2], data[len(data) // 2] ^ 0x10]) + data[len(data) // 2 + 1 :])
            (problem,) = problems_of(weights.restore, copy)
            if "/c/" in name:
                assert problem == f"{name}: its CRC-32C differs: the content has changed; {HELP}"
            elif file.name == "zarr.json":
                assert name in problem or f"params: {file.parent.name}: expected" in problem
            else:
                assert problem == f"{name}: the content has changed; {HELP}"
        file.write_bytes(data)
    weights.restore(copy)


def test_all_damage_at_once(copy):
    flipped = ("layers.0.self_attn.o_proj.weight/c/0/0", "layers.1.mlp.experts.gate_up_proj/c/0/0/0", "norm.weight/c/0")
    for name in flipped:
        file = copy / "params" / "state" / name
        data = file.read_bytes()
        file.write_bytes(bytes([data[0] ^ 1]) + data[1:])
    assert problems_of(weights.restore, copy) == [
        f"params/state/{name}: its CRC-32C differs: the content has changed; {HELP}" for name in flipped
    ]


def test_arrays_of_another_form(copy):
    array = copy / "params" / "state" / "norm.weight" / "zarr.json"
    data = json.loads(array.read_text())
    for key, value, message in (
        ("codecs", [{"name": "bytes", "configuration": {"endian": "big"}}], f"{array.relative_to(copy)}: codecs: not "
         f"as this library writes it; {HELP}"),
        ("data_type", "surprise", f"{array.relative_to(copy)}: describes no array of ours; {HELP}"),
        ("shape", 7, f"{array.relative_to(copy)}: describes no array of ours; {HELP}"),
        ("shape", [127], "params: norm.weight: expected bfloat16 [128], found bfloat16 [127]"),
        ("data_type", "float32", "params: norm.weight: expected bfloat16 [128], found float32 [128]"),
    ):  # fmt: skip
        array.write_text(json.dumps({**data, key: value}))
        assert problems_of(weights.restore, copy) == [message]
    array.write_text(json.dumps(data))
    shutil.copytree(array.parent, array.parent.with_name("extra"))
    assert problems_of(weights.restore, copy) == ["params: extra: unexpected, found bfloat16 [128]"]
    shutil.rmtree(copy / "params" / "state")
    assert problems_of(weights.restore, copy) == [
        "params/state: missing; not written by this release of muse-jax, make the checkpoint anew"
    ]


def test_other_broken_pieces(copy, tmp_path):
    assert problems_of(weights.load, tmp_path / "none") == ["no such folder; check the path"]
    assert problems_of(weights.restore, tmp_path / "none") == ["no such folder; check the path"]
    (tmp_path / "empty").mkdir()
    assert problems_of(weights.load, tmp_path / "empty") == [
        "neither our params/ nor any *.safetensors in it; give the folder that holds the model's config.json"
    ]
    (copy / "config.json").write_text(SMALL.replace(vocab_size=72, pad_token_id=71).to_json())
    assert problems_of(weights.load, copy) == [
        "params: embed_tokens.weight: expected bfloat16 [72, 128], found bfloat16 [64, 128]",
        "params: lm_head.weight: expected bfloat16 [72, 128], found bfloat16 [64, 128]",
    ]
    (copy / "config.json").write_text("{")
    (problem,) = problems_of(weights.load, copy)
    assert problem.startswith("config.json: not valid JSON (")


def test_activation_format_may_be_edited(copy, quantised):
    (copy / "config.json").write_text(SMALL.replace(activation_format="bf16").to_json())
    config, params = weights.load(copy)
    assert config.activation_format == "bf16" and same_bytes(params, quantised)


def test_error_text_stays_short_and_keeps_everything():
    error = CheckpointError("cannot load x", [f"t{i}: missing" for i in range(1118)])
    assert len(error.problems) == 1118
    assert str(error).startswith("cannot load x: 1118 problems\n  - t0: missing\n")
    assert str(error).endswith("\n  ... and 1078 more (all in this error's .problems)")
