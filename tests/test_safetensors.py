"""Hugging Face folders: exact round trips, every spelling that is accepted, every kind of damage that is named."""

import json
import pathlib
import shutil

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import PartitionSpec
from safetensors.numpy import load_file, save_file
from weight_helpers import SMALL, same_bytes, use_oracle_quantiser

from muse_jax import weights
from muse_jax.errors import CheckpointError
from muse_jax.mesh import make_mesh
from muse_jax.tokenizer import byte_tokenizer, load_tokenizer
from muse_jax.weights.hf_names import canonical, to_adjacent, to_split_halves
from muse_jax.weights.safetensors_file import UnreadableFile, open_file

LM = "model.language_model."
E1 = "layers.1.mlp.experts."
F = "model.safetensors"


@pytest.fixture(scope="module")
def masters():
    return weights.random_params(SMALL, 5)


@pytest.fixture(scope="module")
def quantised():
    with pytest.MonkeyPatch.context() as patch:
        use_oracle_quantiser(patch)
        return weights.random_params(SMALL, 5, quantized=True)


@pytest.fixture(scope="module")
def exported(quantised, tmp_path_factory):
    path = tmp_path_factory.mktemp("hf") / "model"
    weights.export_hf(path, SMALL, quantised, byte_tokenizer())
    return path


@pytest.fixture
def copy(exported, tmp_path):
    return pathlib.Path(shutil.copytree(exported, tmp_path / "copy"))


def tensors_of(folder) -> dict[str, np.ndarray]:
    """A file's arrays as copies (the library's own reader, except that float8 is read by ours)."""
    return {key: np.array(tensor.read()) for key, tensor in open_file(folder / F).items()}


def problems_of(folder) -> list[str]:
    with pytest.raises(CheckpointError) as caught:
        weights.import_hf(folder)
    assert caught.value.headline == f"cannot import {folder}"
    return list(caught.value.problems)


def edit_config(folder, change):
    data = json.loads((folder / "config.json").read_text())
    change(data)
    (folder / "config.json").write_text(json.dumps(data))


# --- round trips ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 8])
def test_import_is_the_inverse_of_export(exported, quantised, count):
    mesh = make_mesh(count)
    config, params = weights.load(exported, mesh)
    assert config == SMALL and same_bytes(params, quantised)
    assert params[E1 + "down_proj"].sharding.spec == PartitionSpec("rank")
    assert params["norm.weight"].sharding.is_fully_replicated
    assert load_tokenizer(exported).encode("a").ids == [97]


def test_export_is_the_inverse_of_import(exported, tmp_path):
    weights.export_hf(tmp_path / "again", *weights.import_hf(exported))
    assert (tmp_path / "again" / F).read_bytes() == (exported / F).read_bytes()
    assert (tmp_path / "again" / "config.json").read_bytes() == (exported / "config.json").read_bytes()


def test_shards(quantised, tmp_path):
    weights.export_hf(tmp_path / "m", SMALL, quantised, max_shard_bytes=200_000)
    index = json.loads((tmp_path / "m" / weights.safetensors_io.INDEX_FILE).read_text())
    files = sorted({*index["weight_map"].values()})
    assert len(files) > 3 and files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    assert index["metadata"]["total_size"] == sum(a.nbytes for a in quantised.values())
    assert {(tmp_path / "m" / f).stat().st_mode & 0o777 for f in files} == {
        (tmp_path / "m" / "config.json").stat().st_mode & 0o777
    }
    config, params = weights.load(tmp_path / "m")
    assert config == SMALL and same_bytes(params, quantised)


def test_masters_round_trip(masters, tmp_path):
    weights.export_hf(tmp_path / "m", SMALL, masters)
    config, params = weights.import_hf(tmp_path / "m")
    assert config == SMALL and same_bytes(params, masters)
    # the same weights with a foreign configuration: no masters, plain bf16
    edit_config(tmp_path / "m", lambda data: data.pop("muse_jax"))
    config, params = weights.import_hf(tmp_path / "m")
    assert config.expert_formats == ("bf16",) * 3 and same_bytes(params, masters)


def test_the_librarys_reader_agrees(masters, tmp_path):
    weights.export_hf(tmp_path / "m", SMALL, masters)
    theirs, ours = load_file(tmp_path / "m" / F), tensors_of(tmp_path / "m")
    assert {k: (v.dtype, v.tobytes()) for k, v in theirs.items()} == {
        k: (v.dtype, v.tobytes()) for k, v in ours.items()
    }


def test_exported_names_and_rotary_rows(exported, quantised):
    found = tensors_of(exported)
    assert set(found) == {n if n == "lm_head.weight" else LM + n for n in quantised}
    ours = np.asarray(quantised["layers.0.self_attn.k_proj.weight"])
    theirs = found[LM + "layers.0.self_attn.k_proj.weight"]
    for head in (0, 7):
        for pair in (0, 1, 31):
            row = 64 * head
            assert np.array_equal(theirs[row + pair], ours[row + 2 * pair])
            assert np.array_equal(theirs[row + 32 + pair], ours[row + 2 * pair + 1])
    v = "layers.0.self_attn.v_proj.weight"
    assert np.array_equal(found[LM + v], quantised[v])


@given(st.integers(1, 5), st.integers(1, 3))
def test_row_orders_are_inverse(heads, width):
    rows = np.arange(heads * 64 * width).reshape(heads * 64, width)
    assert np.array_equal(to_split_halves(to_adjacent(rows)), rows)
    assert np.array_equal(to_adjacent(to_split_halves(rows)), rows)


# --- what else is accepted ------------------------------------------------------------------------------------------


def test_other_prefixes_and_foreign_parts(exported, quantised, tmp_path):
    shutil.copy(exported / "config.json", tmp_path)
    found = {key.removeprefix(LM): array for key, array in tensors_of(exported).items()}
    for key in ("model.vision_tower.ln_pre.weight", "model.vision_adapter.fc1.weight", "model.vision_projection.weight",
                "model.audio_tower.norm.weight", LM + "rotary_emb.inv_freq", "layers.0.self_attn.k_scale",
                "layers.0.self_attn.rotary_emb.inv_freq"):  # fmt: skip
        assert canonical(key) is None
        found[key] = np.ones(3, np.float32)
    save_file(found, tmp_path / F)
    assert same_bytes(weights.load(tmp_path)[1], quantised)


def test_experts_one_by_one(masters, tmp_path):
    weights.export_hf(tmp_path / "m", SMALL, masters)
    found = tensors_of(tmp_path / "m")
    for layer in range(3):
        prefix = f"{LM}layers.{layer}.mlp.experts."
        gate_up, down = found.pop(prefix + "gate_up_proj"), found.pop(prefix + "down_proj")
        for e in range(8):
            found[f"{prefix}{e}.gate_proj.weight"] = gate_up[e, :128].copy()
            found[f"{prefix}{e}.up_proj.weight"] = gate_up[e, 128:].copy()
            found[f"{prefix}{e}.down_proj.weight"] = down[e].copy()
    save_file(found, tmp_path / "m" / F)
    config, params = weights.import_hf(tmp_path / "m")
    assert config == SMALL and same_bytes(params, masters)
    del found[prefix + "3.up_proj.weight"]
    found[prefix + "4.down_proj.weight"] = np.ones((2, 2), np.float32)
    found[prefix + "8.down_proj.weight"] = found[prefix + "7.down_proj.weight"]
    save_file(found, tmp_path / "m" / F)
    assert problems_of(tmp_path / "m") == [
        f"{prefix}3.up_proj.weight: missing, expected bfloat16 [128, 128]",
        f"{F}: {prefix}4.down_proj.weight: expected bfloat16 [128, 128], found float32 [2, 2]",
        f"{F}: {prefix}8.down_proj.weight: unexpected, found bfloat16 [128, 128]",
    ]


def test_formats_come_from_dtypes_not_from_the_configuration(copy, quantised):
    edit_config(copy, lambda data: (data.pop("muse_jax"), data.pop("quantization_config")))
    config, params = weights.import_hf(copy)
    assert config == SMALL and same_bytes(params, quantised)


def test_absent_input_scales_are_one(copy, quantised):
    found = {k: a for k, a in tensors_of(copy).items() if not k.endswith("_input_scale")}
    save_file(found, copy / F)
    params = weights.import_hf(copy)[1]
    assert list(params) == list(quantised)
    assert np.array_equal(params[E1 + "gate_up_proj_input_scale"], np.ones((8, 2), np.float32))
    assert np.array_equal(params[E1 + "down_proj_input_scale"], np.ones(8, np.float32))


def test_arrays_do_not_follow_the_file(copy, quantised):
    params = weights.import_hf(copy)[1]
    with (copy / F).open("r+b") as file:
        file.seek(100_000)
        file.write(b"\xaa" * 200_000)
    assert same_bytes(params, quantised)


# --- what is wrong --------------------------------------------------------------------------------------------------


def test_all_structural_problems_at_once(copy):
    found = tensors_of(copy)
    del found[LM + "norm.weight"], found[LM + E1 + "down_proj_weight_scale"]
    found[LM + "layers.0.mlp.gate.weight"] = found[LM + "layers.0.mlp.gate.weight"].astype(ml_dtypes.bfloat16)
    found["lm_head.weight"] = found["lm_head.weight"][:-1]
    found[LM + "layers.3.input_layernorm.weight"] = np.zeros(128, ml_dtypes.bfloat16)
    found["model.layers.0.input_layernorm.weight"] = found[LM + "layers.0.input_layernorm.weight"]
    save_file(found, copy / F)
    assert sorted(problems_of(copy)) == sorted([
        f"{LM}norm.weight: missing, expected bfloat16 [128]",
        f"{LM}{E1}down_proj_weight_scale: missing, expected float8_e4m3fn [8, 128, 8]",
        f"{F}: {LM}layers.0.mlp.gate.weight: expected float32 [8, 128], found bfloat16 [8, 128]",
        f"{F}: lm_head.weight: expected bfloat16 [64, 128], found bfloat16 [63, 128]",
        f"{F}: {LM}layers.3.input_layernorm.weight: unexpected, found bfloat16 [128]",
        DUPLICATE,
    ])  # fmt: skip


DUPLICATE = (
    f"{F}: model.layers.0.input_layernorm.weight: duplicated, also in {F} as {LM}layers.0.input_layernorm.weight; "
    "remove one of the two"
)


def test_all_bad_values_at_once(copy):
    found = tensors_of(copy)
    scale = found[LM + E1 + "down_proj_weight_scale"].view(np.uint8)
    scale[2, 3, 4], scale[5, 0, 0] = 0x7F, 0x90
    found[LM + E1 + "gate_up_proj_weight_scale_2"][7, 1] = -1
    found[LM + E1 + "down_proj_input_scale"][0] = 0
    found[LM + "norm.weight"][9] = np.nan
    found[LM + "layers.0.self_attn.q_proj.weight"][1, 2] = np.inf
    save_file(found, copy / F)
    assert sorted(problems_of(copy)) == sorted([
        f"{F}: {LM}{E1}down_proj_weight_scale: expected block scales that are neither negative nor NaN, "
        "found 2 other(s), the first one nan at [2, 3, 4]",
        f"{F}: {LM}{E1}gate_up_proj_weight_scale_2: expected scales that are finite and not negative, "
        "found 1 other(s), the first one -1.0 at [7, 1]",
        f"{F}: {LM}{E1}down_proj_input_scale: expected scales that are finite and above 0, "
        "found 1 other(s), the first one 0.0 at [0]",
        f"{F}: {LM}norm.weight: expected finite numbers, found 1 other(s), the first one nan at [9]",
        f"{F}: {LM}layers.0.self_attn.q_proj.weight: expected finite numbers, found 1 other(s), "
        "the first one inf at [1, 2]",
    ])  # fmt: skip


def test_missing_and_empty(copy, tmp_path):
    (copy / F).unlink()
    assert problems_of(copy) == [f"{F}: missing; the folder has no safetensors files, download them"]
    assert problems_of(tmp_path / "none") == [
        "config.json: No such file or directory; check the path and its permissions"
    ]


def test_unusable_configuration(copy):
    edit_config(copy, lambda data: data["text_config"].update(hidden_act="gelu", vocab_size=3))
    found = problems_of(copy)
    assert found[0] == "config.json: hidden_act: given 'gelu', supported: 'silu'"
    assert found[1].startswith("config.json: vocab_size: given 3, allowed: a multiple of 8")


@pytest.mark.parametrize("keep", [0, 5, 8, 100, 1_000_000 - 1, -1])
def test_truncated_files(copy, keep):
    data = (copy / F).read_bytes()
    (copy / F).write_bytes(data[:keep])
    (problem,) = problems_of(copy)
    assert problem.startswith(f"{F}: cannot be read as safetensors (")
    assert problem.endswith("; truncated or damaged, download it again")


@given(st.integers(0, 4000), st.integers(1, 255))
def test_flipped_header_bytes_never_crash(exported, tmp_path_factory, position, flip):
    folder = tmp_path_factory.mktemp("flip")
    shutil.copy(exported / "config.json", folder)
    data = bytearray((exported / F).read_bytes())
    data[position] ^= flip
    (folder / F).write_bytes(data)
    try:
        weights.import_hf(folder)
    except CheckpointError as error:
        assert error.problems
    shutil.rmtree(folder)


@given(st.binary(max_size=64), st.integers(0, 200))
def test_random_files_are_unreadable_or_sound(tmp_path_factory, noise, length):
    path = tmp_path_factory.mktemp("noise") / "x.safetensors"
    path.write_bytes(length.to_bytes(8, "little") + noise)
    try:
        assert all(tensor.read().shape == tensor.shape for tensor in open_file(path).values())
    except UnreadableFile as error:
        assert str(error)


def test_unknown_dtype(tmp_path):
    header = b'{"a":{"dtype":"F8_E8M0","shape":[2],"data_offsets":[0,2]}}'
    (tmp_path / F).write_bytes(len(header).to_bytes(8, "little") + header + b"ab")
    with pytest.raises(UnreadableFile, match=r"^holds tensors of dtype F8_E8M0, which this library cannot read$"):
        open_file(tmp_path / F)


def test_empty_and_scalar_tensors(tmp_path):
    save_file({"none": np.zeros((0, 3), np.float32), "one": np.array(2.5, np.float32)}, tmp_path / F)
    found = open_file(tmp_path / F)
    assert found["none"].read().shape == (0, 3) and found["one"].read() == 2.5


# --- shards and their index -----------------------------------------------------------------------------------------


@pytest.fixture
def sharded(quantised, tmp_path):
    weights.export_hf(tmp_path / "m", SMALL, quantised, max_shard_bytes=400_000)
    return tmp_path / "m"


def index_of(folder):
    return json.loads((folder / "model.safetensors.index.json").read_text())


def test_missing_shard_is_the_only_news(sharded):
    first, second, *_ = sorted({*index_of(sharded)["weight_map"].values()})
    (sharded / first).unlink()
    assert problems_of(sharded) == [f"{first}: missing; download it again"]
    (sharded / second).write_bytes(b"x")
    found = problems_of(sharded)
    assert len(found) == 2 and found[1].startswith(f"{second}: cannot be read as safetensors (")


def test_tensor_not_where_the_index_says(sharded):
    index = index_of(sharded)
    key, file = "lm_head.weight", index["weight_map"]["lm_head.weight"]
    found = {k: np.array(t.read()) for k, t in open_file(sharded / file).items() if k != key}
    save_file(found, sharded / file)
    assert problems_of(sharded) == [
        f"{file}: {key}: missing, although model.safetensors.index.json says it is in this file"
    ]


def test_duplicate_over_two_shards(sharded):
    files = sorted({*index_of(sharded)["weight_map"].values()})
    key = next(iter(open_file(sharded / files[0])))
    found = {k: np.array(t.read()) for k, t in open_file(sharded / files[1]).items()}
    found[key] = np.array(open_file(sharded / files[0])[key].read())
    save_file(found, sharded / files[1])
    assert problems_of(sharded) == [
        f"{files[1]}: {key}: duplicated, also in {files[0]} as {key}; remove one of the two"
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "model.safetensors.index.json: not valid JSON ("),
        ("{}", "model.safetensors.index.json: expected a weight_map of tensor names to file names in this folder"),
        (
            '{"weight_map": {"a": "../b.safetensors"}}',
            "model.safetensors.index.json: expected a weight_map of tensor names to file names in this folder",
        ),
        ('{"weight_map": {}}', "model.safetensors.index.json: weight_map is empty"),
    ],
)
def test_broken_index(sharded, text, message):
    (sharded / "model.safetensors.index.json").write_text(text)
    (problem,) = problems_of(sharded)
    assert problem.startswith(message)


def test_export_checks_before_writing(masters, tmp_path):
    bad = {name: array for name, array in masters.items() if name != "norm.weight"}
    with pytest.raises(CheckpointError) as caught:
        weights.export_hf(tmp_path / "m", SMALL, bad)
    assert caught.value.problems == ("norm.weight: missing, expected bfloat16 [128]",)
    assert caught.value.headline == f"cannot export to {tmp_path / 'm'}: the parameters do not fit the configuration"
    assert list(tmp_path.iterdir()) == []
