"""`muse-jax inspect`: its numbers are what loading allocates, it loads nothing, it names everything that is wrong."""

import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import time
from types import SimpleNamespace

import jax
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file
from typer.testing import CliRunner

from muse_jax import decode, inspection, weights
from muse_jax.cli import app
from muse_jax.config import MuseSparkConfig
from muse_jax.errors import CheckpointError
from muse_jax.inspection import inspect_checkpoint
from muse_jax.mesh import make_mesh
from muse_jax.weights.hf_names import hf_key
from muse_jax.weights.names import parameter_specs
from muse_jax.weights.repack import decode_shapes, repack
from muse_jax.weights.safetensors_file import DTYPES, open_file

ROOT = pathlib.Path(__file__).parent.parent
TINY = MuseSparkConfig.tiny()
LM = "model.language_model."
INDEX = "model.safetensors.index.json"
TAGS = {dtype: tag for tag, dtype in DTYPES.items()}


@pytest.fixture(scope="module")
def params():
    return weights.random_params(TINY, 3, quantized=True)


@pytest.fixture(scope="module")
def folders(params, tmp_path_factory):
    path = tmp_path_factory.mktemp("inspect")
    weights.save(path / "orbax", TINY, params)
    weights.export_hf(path / "single", TINY, params)
    weights.export_hf(path / "shards", TINY, params, max_shard_bytes=4_000_000)
    return path


@pytest.fixture
def copy(folders, tmp_path):
    return lambda name: pathlib.Path(shutil.copytree(folders / name, tmp_path / name))


def device_bytes(arrays, device) -> int:
    return sum(s.data.nbytes for a in arrays for s in a.addressable_shards if s.device == device)


# --- the numbers ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["orbax", "single", "shards"])
def test_contents(folders, params, kind):
    found = inspect_checkpoint(folders / kind)
    assert (
        found.problems == () and found.config == TINY and found.kind == ("orbax" if kind == "orbax" else "safetensors")
    )
    assert found.tensors == len(params) and found.bytes == sum(a.nbytes for a in params.values())
    assert {g.name: (g.tensors, g.dtypes) for g in found.groups} == {
        "embedding": (1, ("bfloat16",)),
        "attention": (6 * 5, ("bfloat16",)),
        "router": (6 * 2, ("float32",)),
        "experts bf16": (2 * 2, ("bfloat16",)),
        "experts NVFP4": (4 * 8, ("uint8", "float8_e4m3fn", "float32")),
        "expert projections": (6 * 2, ("bfloat16",)),
        "norms, gates": (6 * 7 + 1, ("bfloat16",)),
        "head": (1, ("bfloat16",)),
    }
    sizes = {g.name: g.bytes for g in found.groups}
    assert sizes["attention"] == sum(a.nbytes for n, a in params.items() if ".self_attn." in n)
    assert sizes["experts NVFP4"] == sum(
        a.nbytes for n, a in params.items() if re.match(r"layers\.[1-4]\.mlp\.experts\.(gate_up|down)", n)
    )


@pytest.mark.parametrize("count", [1, 2, 8])
def test_sizes_are_what_is_allocated(folders, params, count):
    mesh = make_mesh(count)
    found = inspect_checkpoint(folders / "orbax", devices=count, batch=3, capacity=100)
    assert found.arrays is not None and found.fit is not None and found.caches is not None
    placed = {name: jax.device_put(params[name], spec.sharding(mesh)) for name, spec in parameter_specs(TINY).items()}
    made = repack(TINY, placed, mesh)
    for array in found.arrays:
        real = getattr(made, array.name)
        assert (array.shape, array.dtype) == (real.shape, real.dtype.name), array.name
        assert 8 * array.size.per_rank + array.size.per_device == real.nbytes
    state = decode.init_state(TINY, mesh, batch=3, capacity=100)
    for device in mesh.devices.flat:
        assert found.fit.weights == device_bytes([getattr(made, a.name) for a in found.arrays], device)
        assert found.fit.caches == device_bytes(jax.tree.leaves(state), device)
        assert found.fit.params == device_bytes(placed.values(), device)
    caches = found.caches
    assert caches.capacity == state.capacity == 112
    assert 8 * 3 * (112 * caches.token_bytes + caches.ring_bytes) == state.nbytes
    longer = decode.init_state(TINY, mesh, batch=3, capacity=128)
    assert longer.nbytes - state.nbytes == 8 * 3 * 16 * caches.token_bytes
    assert longer.rope.nbytes - state.rope.nbytes == 16 * caches.rope_bytes


def test_a_layers_share(folders):
    found = inspect_checkpoint(folders / "orbax")
    assert found.layer_weights is not None and found.weights is not None and found.arrays is not None
    bf16, fp4 = found.layer_weights["bf16"], found.layer_weights["nvfp4"]
    rest = [a.size for a in found.arrays if a.layers is None]
    assert 2 * bf16.per_rank + 4 * fp4.per_rank + sum(s.per_rank for s in rest) == found.weights.per_rank
    assert 6 * bf16.per_device + sum(s.per_device for s in rest) == found.weights.per_device
    assert bf16.per_device == fp4.per_device


@pytest.mark.parametrize("kind", ["bf16", "nvfp4"])
def test_one_kind_of_expert(kind):
    """The kind that no layer has keeps one unused layer; masters pack to the same arrays."""
    config = TINY.replace(expert_formats=(kind,) * 6)
    mesh = make_mesh(8)
    shapes = decode_shapes(config)
    made = repack(config, weights.random_params(config, 1, mesh), mesh)
    assert {n: (s.shape, s.dtype) for n, s in shapes.items()} == {
        n: (getattr(made, n).shape, getattr(made, n).dtype) for n in shapes
    }


def test_masters_and_single_experts(tmp_path):
    """bf16 masters count as stored; experts named one by one are the same bytes in more tensors."""
    config = TINY.replace(expert_formats=("bf16",) * 6)
    weights.export_hf(tmp_path / "m", config, weights.random_params(config, 1))
    stacked = inspect_checkpoint(tmp_path / "m")
    file = tmp_path / "m" / "model.safetensors"
    found = {key: np.array(t.read()) for key, t in open_file(file).items()}
    prefix = LM + "layers.2.mlp.experts."
    gate_up, down = found.pop(prefix + "gate_up_proj"), found.pop(prefix + "down_proj")
    for e in range(16):
        found[f"{prefix}{e}.gate_proj.weight"] = gate_up[e, :256].copy()
        found[f"{prefix}{e}.up_proj.weight"] = gate_up[e, 256:].copy()
        found[f"{prefix}{e}.down_proj.weight"] = down[e].copy()
    found["model.vision_tower.ln_pre.weight"] = np.ones(3, np.float32)
    save_file(found, file)
    single = inspect_checkpoint(tmp_path / "m")
    assert single.problems == stacked.problems == () and single.weights == stacked.weights
    assert single.fit is not None and stacked.fit is not None and single.fit.params == stacked.fit.params
    groups = [{g.name: g for g in found.groups} for found in (stacked, single)]
    assert [g["experts bf16"].tensors for g in groups] == [12, 10 + 48]
    assert groups[0]["experts bf16"].bytes == groups[1]["experts bf16"].bytes
    assert groups[1]["other models' parts"].bytes == 12 and single.bytes == stacked.bytes + 12


# --- does it fit ----------------------------------------------------------------------------------------------------


class Gpu(SimpleNamespace):
    platform, device_kind = "cuda", "NVIDIA H200"

    def memory_stats(self):
        return self.stats


def on_gpus(monkeypatch, *stats):
    shapes = decode_shapes(TINY)
    monkeypatch.setattr(inspection, "jax", SimpleNamespace(devices=lambda: [Gpu(stats=s) for s in stats]))
    monkeypatch.setattr(inspection, "decode_shapes", lambda config: shapes)


@pytest.mark.parametrize("count", [1, 2, 4, 8])
@pytest.mark.parametrize("batch", [1, 5])
def test_largest_capacity_is_the_largest(folders, monkeypatch, count, batch):
    def fit(limit, capacity):
        with monkeypatch.context() as patch:
            on_gpus(patch, *[{"bytes_limit": limit + 7, "bytes_in_use": 7}] * 8)
            found = inspect_checkpoint(folders / "orbax", devices=count, batch=batch, capacity=capacity).fit
        assert found is not None and found.available == limit
        return found

    needed = fit(1 << 40, 1024)
    assert needed.largest_capacity == TINY.max_position_embeddings and needed.fits and needed.fits_with_params
    exact = needed.weights + needed.caches
    assert fit(exact, 1024).left == 0 and fit(exact, 1024).fits and not fit(exact, 1024).fits_with_params
    assert fit(exact, 16).largest_capacity == 1024
    assert not fit(exact - 1, 1024).fits and fit(exact - 1, 1024).largest_capacity == 1008
    assert fit(needed.weights, 16).largest_capacity == 0
    assert fit(exact + needed.params, 1024).fits_with_params


def test_devices_that_are_not_here(folders, monkeypatch):
    on_gpus(monkeypatch, {"bytes_limit": 100, "bytes_in_use": 10})
    here, eight = (inspect_checkpoint(folders / "orbax", devices=n).fit for n in (None, 8))
    assert here is not None and (here.devices, here.ranks_per_device, here.available) == (1, 8, 90)
    assert eight is not None and (eight.devices, eight.ranks_per_device, eight.available) == (8, 1, 90)
    assert "others" not in here.available_from and "1 here, the others taken as alike" in eight.available_from
    on_gpus(monkeypatch, {"bytes_limit": 100}, {"bytes_limit": 50})
    two = inspect_checkpoint(folders / "orbax").fit
    assert two is not None and (two.devices, two.available) == (2, 50)
    on_gpus(monkeypatch, None)
    assert inspect_checkpoint(folders / "orbax").fit is None
    assert "unknown: the devices do not say" in command(folders / "orbax")


def test_cpu_devices_share_the_machine(folders, monkeypatch, tmp_path):
    (tmp_path / "meminfo").write_text("MemTotal: 900 kB\nMemAvailable:     800 kB\n")
    monkeypatch.setattr(inspection, "_MEMINFO", tmp_path / "meminfo")
    for count in (1, 4, 8):
        fit = inspect_checkpoint(folders / "orbax", devices=count).fit
        assert fit is not None and fit.available == 800 * 1024 // count and "available memory" in fit.available_from
    monkeypatch.setattr(inspection, "_MEMINFO", tmp_path / "none")
    fit = inspect_checkpoint(folders / "orbax", devices=1).fit
    assert fit is not None and fit.available > 1 << 28 and "whether free or not" in fit.available_from


# --- what is wrong --------------------------------------------------------------------------------------------------


def command(*arguments, code=0) -> str:
    with pytest.MonkeyPatch.context() as patch:  # this process has its devices already
        patch.setattr("muse_jax.cli._prepare_cpu", lambda devices: None)
        patch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
        done = CliRunner().invoke(app, ["inspect", *map(str, arguments)])
    assert done.exit_code == code, done.output
    return done.output


def problems_of(folder) -> list[str]:
    """As the function has them; the command prints the same, one line each, and exits with 1."""
    problems = list(inspect_checkpoint(folder).problems)
    lines = command(folder, code=1 if problems else 0).splitlines()
    assert [line.removeprefix("problem: ") for line in lines if line.startswith("problem: ")] == problems
    assert not any("Traceback" in line for line in lines) and all("\n" not in problem for problem in problems)
    return problems


def shard_of(folder, key):
    return json.loads((folder / INDEX).read_text())["weight_map"][key]


def rewrite(file, change):
    found = {key: np.array(t.read()) for key, t in open_file(file).items()}
    change(found)
    save_file(found, file)


def test_wrong_tensors(copy):
    folder = copy("single")

    def change(found):
        del found[LM + "norm.weight"]
        found["lm_head.weight"] = found["lm_head.weight"][:-1].copy()
        found[LM + "layers.0.mlp.gate.weight"] = found[LM + "layers.0.mlp.gate.weight"].astype(ml_dtypes.bfloat16)
        found[LM + "layers.6.input_layernorm.weight"] = np.zeros(256, ml_dtypes.bfloat16)
        found[LM + "surprise"] = np.zeros(2, np.int8)

    rewrite(folder / "model.safetensors", change)
    f = "model.safetensors"
    assert sorted(problems_of(folder)) == sorted([
        f"{LM}norm.weight: missing, expected bfloat16 [256]",
        f"{f}: lm_head.weight: expected bfloat16 [384, 256], found bfloat16 [383, 256]",
        f"{f}: {LM}layers.0.mlp.gate.weight: expected float32 [16, 256], found bfloat16 [16, 256]",
        f"{f}: {LM}layers.6.input_layernorm.weight: unexpected, found bfloat16 [256]",
        f"{f}: {LM}surprise: unexpected, found int8 [2]",
    ])  # fmt: skip
    found = inspect_checkpoint(folder)
    assert {g.name: g.bytes for g in found.groups}["unexpected"] == 2
    assert found.weights == inspect_checkpoint(copy("orbax")).weights  # of the complete model


def test_wrong_tensors_in_orbax(copy):
    folder = copy("orbax")
    (folder / "config.json").write_text(TINY.replace(vocab_size=392, expert_formats=("bf16",) * 6).to_json())
    assert problems_of(folder) == [
        "params: embed_tokens.weight: expected bfloat16 [392, 256], found bfloat16 [384, 256]",
        "params: lm_head.weight: expected bfloat16 [392, 256], found bfloat16 [384, 256]",
        *(
            f"params: layers.{i}.mlp.experts: NVFP4 weights, but expert_formats[{i}] is 'bf16'; set it to 'nvfp4'"
            for i in (1, 2, 3, 4)
        ),
    ]


def test_shards(copy):
    folder = copy("shards")
    lost, cut = shard_of(folder, LM + "embed_tokens.weight"), shard_of(folder, "lm_head.weight")
    assert lost != cut
    (folder / lost).unlink()
    os.truncate(folder / cut, os.path.getsize(folder / cut) - 1)
    first, second = problems_of(folder)
    assert first == f"{lost}: missing; download it again"
    assert second.startswith(f"{cut}: cannot be read as safetensors (") and second.endswith("download it again")
    (folder / cut).write_bytes(b"\x10" + bytes(7) + b"{" * 16)
    assert problems_of(folder)[1].startswith(f"{cut}: cannot be read as safetensors (")


def test_files_beside_the_model(copy):
    """No error, but said: their tensors, which might be the ones that are missing, were not looked at."""
    extra = {"norm.weight": np.zeros(3, np.float32)}
    for kind, complete in (("single", "model.safetensors"), ("shards", INDEX)):
        folder = copy(kind)
        assert (folder / complete).is_file() and inspect_checkpoint(folder).unread == ()
        for name in ("b.safetensors", "a.safetensors"):
            save_file(extra, folder / name)
        assert inspect_checkpoint(folder).unread == ("a.safetensors", "b.safetensors") and problems_of(folder) == []
        line = r"^not read +a\.safetensors, b\.safetensors \(beside model\.safetensors or its index\)$"
        assert re.search(line, command(folder), re.M)


def test_tensor_not_where_the_index_says(copy):
    folder = copy("shards")
    file = shard_of(folder, "lm_head.weight")
    rewrite(folder / file, lambda found: found.pop("lm_head.weight"))
    assert problems_of(folder) == [f"{file}: lm_head.weight: missing, although {INDEX} says it is in this file"]


@pytest.mark.parametrize("text", ["{", "[]", "\x00", '{"weight_map": 3}', ""])
def test_unreadable_index(copy, text):
    folder = copy("shards")
    (folder / INDEX).write_text(text)
    (problem,) = problems_of(folder)
    assert problem.startswith(f"{INDEX}: ")


@pytest.mark.parametrize("kind", ["orbax", "single"])
def test_unreadable_configuration(copy, params, kind):
    folder = copy(kind)
    (folder / "config.json").write_bytes(b"\xff\xfe{")
    (problem,) = problems_of(folder)
    assert problem.startswith("config.json: not valid JSON (")
    found = inspect_checkpoint(folder)
    assert found.tensors == len(params) and found.config is found.model is found.weights is found.fit is None
    (folder / "config.json").unlink()
    (problem,) = problems_of(folder)
    assert problem == "config.json: No such file or directory; check the path and its permissions"


def test_every_damaged_orbax_file(copy):
    """Of one layer and of no layer; the rest of the contents is still told."""
    folder = copy("orbax")
    files = [f for f in (folder / "params").rglob("*") if f.is_file() and not re.search(r"layers\.[01235]", str(f))]
    for file in files:
        data, name = file.read_bytes(), str(file.relative_to(folder))
        file.unlink()
        found = weights.read_contents(folder)  # what inspecting shows
        gone = "No such file or directory; check the path and its permissions"
        lost = file.name == "zarr.json"
        assert found.problems == [
            f"{name}: {gone}" if lost else f"{name}: missing; copy the checkpoint again, or make it anew"
        ]
        assert len(found.tensors) == 135 - lost and found.config == TINY
        file.write_bytes(data + b"x")
        (problem,) = weights.read_contents(folder).problems
        assert problem.startswith(f"{name}: ")
        file.write_bytes(data)
    file.unlink()
    damaged = inspect_checkpoint(folder)
    assert len(damaged.problems) == 1 and damaged.weights is not None and damaged.fit is not None
    shutil.rmtree(folder / "params" / "state")
    assert re.search(r"^checkpoint +Orbax, tensors unreadable$", command(folder, code=1), re.M)
    assert problems_of(folder) == [
        "params/state: missing; not written by this release of muse-jax, make the checkpoint anew"
    ]


def test_neither_kind_of_folder(tmp_path):
    with pytest.raises(CheckpointError, match=r"(?s)cannot inspect .*no such folder; check the path") as caught:
        inspect_checkpoint(tmp_path / "none")
    assert len(caught.value.problems) == 1
    with pytest.raises(CheckpointError, match="neither our params/ nor any"):
        inspect_checkpoint(tmp_path)


# --- the released model, described in a few KB ----------------------------------------------------------------------


def describe_released(folder) -> int:
    """Headers that claim the released shapes over sparse files, a shard per layer; returns the claimed bytes."""
    config = MuseSparkConfig.released()
    (folder / "config.json").write_text(json.dumps(config.to_hf()))
    shards: dict[str, list] = {}
    for name, spec in parameter_specs(config).items():
        shards.setdefault(name.split(".")[1] if name.startswith("layers.") else "rest", []).append(spec)
    weight_map, total = {}, 0
    for shard, specs in shards.items():
        header, offset = {}, 0
        for spec in specs:
            span = [offset, offset + spec.nbytes]
            header[hf_key(spec.name)] = {"dtype": TAGS[spec.dtype], "shape": spec.shape, "data_offsets": span}
            offset = span[1]
        text = json.dumps(header).encode()
        file = folder / f"model-{shard}.safetensors"
        file.write_bytes(len(text).to_bytes(8, "little") + text)
        os.truncate(file, 8 + len(text) + offset)
        weight_map |= dict.fromkeys(header, file.name)
        total += offset
    (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    return total


def test_the_released_model_without_loading_it(tmp_path):
    total = describe_released(tmp_path)
    assert total > 450e9 and sum(f.stat().st_blocks * 512 for f in tmp_path.iterdir()) < 4e6
    start = time.monotonic()
    script = (
        "import resource, sys\nfrom muse_jax import cli\n"
        "imported = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "try:\n    cli.main()\n"
        "finally:\n    print('added KB', resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - imported)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, "inspect", tmp_path, "--devices", "8", "--batch", "4", "--capacity", "65536"],
        capture_output=True, text=True, cwd=ROOT, timeout=300,
    )  # fmt: skip
    elapsed = time.monotonic() - start
    assert done.returncode == 0, done.stdout + done.stderr
    added = re.search(r"added KB (\d+)", done.stdout)
    assert added is not None and int(added[1]) < 400_000, done.stdout  # XLA's start and the traced shapes
    assert elapsed < 120  # seconds; 8 on two idle cores
    assert re.search(r"Hugging Face safetensors, 1,\d{3} tensors, \d{3}\.\d GB", done.stdout)
    assert "62 layers (16 full, 46 sliding over 2048), hidden 8192" in done.stdout
    # 16 full layers, 2 of 16 kv heads, k and v of 64 bf16; 46 sliding layers with rings of 2112 slots
    assert (
        f"{16 * 2 * 2 * 64 * 2:,} bytes per token" in done.stdout and f"{46 * 2112 * 512:,} per sequence" in done.stdout
    )
    assert not any(line.endswith((" ", "…")) and "…" in line for line in done.stdout.splitlines())


# --- printing -------------------------------------------------------------------------------------------------------


def test_plain_when_not_a_terminal(folders):
    text = command(folders / "orbax", "--devices", 2, "--batch", 2, "--capacity", 64)
    assert not re.search(r"[\x1b┃│━─…]", text)
    assert re.search(r"^checkpoint +Orbax, 135 tensors, 23\.7 MB$", text, re.M)
    assert re.search(r"^experts NVFP4 +32 +uint8, float8_e4m3fn, float32 +3,540,480 *$", text, re.M)
    assert re.search(r"^w13_fp4 +uint8 +4 +589,824 +2,359,296 *$", text, re.M)
    assert re.search(r"^all +5,468,168 +38,960 *$", text, re.M)
    assert "on each of 2 x cpu" in text and "shared by 2 CPU devices" in text
