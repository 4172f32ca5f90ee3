"""Conversion: the same bytes in every form, and everything that is wrong named at once."""

import io
import json
import os
import pathlib
import re
import shutil
import signal
import time
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest
from convert_helpers import (
    LM,
    Stop,
    file_of,
    make_folders,
    problems_of,
    rewrite,
    small_pieces,  # noqa: F401  (a fixture that works by being here)
    stopping,
    to_hf,
)
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from safetensors.numpy import save_file
from typer.testing import CliRunner
from weight_helpers import SMALL, same_bytes, tree, use_oracle_quantiser

from muse_jax import weights
from muse_jax.cli import app
from muse_jax.errors import CheckpointError
from muse_jax.mesh import make_mesh
from muse_jax.progress import progress_bar
from muse_jax.weights import convert, convert_checkpoint, hf_names
from muse_jax.weights.orbax_io import OrbaxTarget
from muse_jax.weights.safetensors_file import FileWriter, open_file
from muse_jax.weights.safetensors_io import SafetensorsSource

ROOT = pathlib.Path(__file__).parent.parent
HELP = "copy the checkpoint again, or make it anew"


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    path = tmp_path_factory.mktemp("convert")
    return path, make_folders(path)


@pytest.fixture(scope="module")
def folders_of(both):
    return both[0]


@pytest.fixture(scope="module")
def quantised(both):
    return both[1]


@pytest.fixture
def hf(folders_of, tmp_path):
    return pathlib.Path(shutil.copytree(folders_of / "hf", tmp_path / "hf"))


# --- round trips ----------------------------------------------------------------------------------------------------


def test_every_form_to_every_form(folders_of, quantised, tmp_path):
    """What is converted has the bytes of what is saved or exported, on every way."""
    made = to_hf(folders_of / "orbax", tmp_path / "hf")
    assert (made.form, made.resumed_bytes, made.left_out) == ("hf", 0, {})
    assert made.bytes == sum(a.nbytes for a in quantised.values()) and made.folder == tmp_path / "hf"
    assert convert_checkpoint(folders_of / "hf", tmp_path / "orbax").form == "orbax"
    to_hf(folders_of / "hf", tmp_path / "meta", to="meta")
    to_hf(folders_of / "orbax", tmp_path / "meta again", to="meta")
    convert_checkpoint(tmp_path / "meta", tmp_path / "orbax from meta")
    to_hf(tmp_path / "meta", tmp_path / "hf from meta", to="hf")
    convert_checkpoint(folders_of / "orbax", tmp_path / "copy", to="orbax")
    saved, exported = tree(folders_of / "orbax"), tree(folders_of / "hf")
    assert tree(tmp_path / "hf") == tree(tmp_path / "hf from meta") == exported
    assert tree(tmp_path / "orbax") == tree(tmp_path / "orbax from meta") == tree(tmp_path / "copy") == saved
    assert tree(tmp_path / "meta") == tree(tmp_path / "meta again") != exported
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "copy", "hf", "hf from meta", "meta", "meta again", "orbax", "orbax from meta",
    ]  # fmt: skip


def test_masters(tmp_path):
    masters = weights.random_params(SMALL, 6)
    weights.save(tmp_path / "orbax", SMALL, masters)
    to_hf(tmp_path / "orbax", tmp_path / "hf")
    convert_checkpoint(tmp_path / "hf", tmp_path / "again")
    assert tree(tmp_path / "again") == tree(tmp_path / "orbax")
    assert same_bytes(weights.load(tmp_path / "hf")[1], masters)


def test_metas_rows(folders_of, quantised, tmp_path):
    """Files say it themselves; of files that do not, the caller does."""
    to_hf(folders_of / "hf", tmp_path / "meta", to="meta")
    name = "layers.2.self_attn.q_proj.weight"
    file = file_of(tmp_path / "meta", name)
    assert open_file(file)[LM + name].read().tobytes() == np.asarray(quantised[name]).tobytes()
    assert same_bytes(weights.load(tmp_path / "meta")[1], quantised)
    assert sorted(problems_of(tmp_path / "meta", tmp_path / "x", source_rows="hf")) == [
        f"{file.name}: its muse_jax_row_order is 'meta', expected 'hf'; leave the order of the rows to the file"
        for file in sorted((tmp_path / "meta").glob("*.safetensors"))
    ]
    for file in (tmp_path / "meta").glob("*.safetensors"):
        rewrite(file, lambda found: None)  # without metadata, as a foreign file
    assert same_bytes(weights.import_hf(tmp_path / "meta", row_order="meta")[1], quantised)
    assert not same_bytes(weights.import_hf(tmp_path / "meta")[1], quantised)
    convert_checkpoint(tmp_path / "meta", tmp_path / "orbax", source_rows="meta")
    assert tree(tmp_path / "orbax") == tree(folders_of / "orbax")


def test_what_the_decoder_has_no_use_for_is_told(hf, folders_of, tmp_path):
    rewrite(
        file_of(hf, "norm.weight"),
        lambda found: found.update({"model.vision_tower.a": np.ones(5, np.float32), "model.audio_tower.b": np.ones(2)}),
    )
    for name in ("tokenizer_config.json", "chat_template.jinja", "README.md"):
        (hf / name).write_text(name)
    assert convert_checkpoint(hf, tmp_path / "m").left_out == {"model.vision_tower.a": 20, "model.audio_tower.b": 16}
    found = tree(tmp_path / "m")
    assert found.pop("tokenizer_config.json") == b"tokenizer_config.json" and found.pop("chat_template.jinja")
    assert found == tree(folders_of / "orbax")


SHAPES = st.dictionaries(
    st.text(st.characters(codec="utf-8", exclude_categories=("Cs",)), min_size=1, max_size=8),
    st.tuples(
        st.sampled_from(["float32", "bfloat16", "float8_e4m3fn", "uint8"]),
        st.lists(st.integers(1, 5), min_size=1, max_size=3),
    ),
    min_size=1,
    max_size=6,
)


@given(SHAPES, st.randoms(use_true_random=False))
def test_files_are_the_librarys(tmp_path_factory, shapes, random):
    """Slices in any order make the file that the library makes of whole tensors."""
    folder = tmp_path_factory.mktemp("file")
    shapes.pop("__metadata__", None)
    arrays = {}
    for key, (kind, shape) in shapes.items():
        data = random.randbytes(int(np.prod(shape)) * np.dtype(kind).itemsize)
        arrays[key] = np.frombuffer(data, np.dtype(kind)).reshape(shape)
    metadata = {"format": "pt"}
    save_file(arrays, folder / "theirs", metadata=metadata)
    slices = [(key, row) for key, array in arrays.items() for row in range(len(array))]
    random.shuffle(slices)
    for key, row in slices:  # every time as if by a new process
        FileWriter(folder / "ours", arrays, metadata).write(key, row, arrays[key][row : row + 1])
    if arrays:
        assert (folder / "ours").read_bytes() == (folder / "theirs").read_bytes()
    shutil.rmtree(folder)


# --- what is wrong --------------------------------------------------------------------------------------------------


def test_all_bad_values_at_once_and_once_repaired(hf, folders_of, tmp_path):
    """In pieces apart; nothing with the final name; what was good is not read again after the repair."""
    original = tree(hf)
    e, v, q = "layers.1.mlp.experts.down_proj_weight_scale", "layers.2.self_attn.v_proj.weight", "norm.weight"

    def damage(found):
        for key in found.keys() & {LM + e, LM + v, LM + q}:
            flat = found[key].reshape(-1)
            if key == LM + e:
                found[key].view(np.uint8)[[1, 6], 3, 4] = 0x7F
            else:
                flat[[1, -1]] = np.nan

    for name in (e, v, q):
        rewrite(file_of(hf, name), damage)
    expected = [
        f"{file_of(hf, v).name}: {LM}{v}: expected finite numbers, found 2 other(s), the first one nan at [0, 1]",
        f"{file_of(hf, q).name}: {LM}{q}: expected finite numbers, found 2 other(s), the first one nan at [1]",
        f"{file_of(hf, e).name}: {LM}{e}: expected block scales that are neither negative nor NaN, "
        "found 2 other(s), the first one nan at [1, 3, 4]",
    ]
    assert sorted(problems_of(hf, tmp_path / "m")) == sorted(expected)
    assert not (tmp_path / "m").exists() and (tmp_path / ".m.partial").is_dir()
    for name in (e, v, q):
        file = file_of(hf, name)
        file.write_bytes(original[file.name])
    assert convert_checkpoint(hf, tmp_path / "m").resumed_bytes > 0
    assert tree(tmp_path / "m") == tree(folders_of / "orbax")


def test_all_structural_problems_at_once_and_nothing_written(hf, tmp_path):
    norm, head = file_of(hf, "norm.weight"), file_of(hf, "layers.0.input_layernorm.weight")
    assert norm != head
    rewrite(head, lambda found: found.update({LM + "layers.0.mlp.gate.weight": np.zeros((3, 2), np.float32)}))
    os.truncate(norm, norm.stat().st_size - 1)
    (problem, other) = problems_of(hf, tmp_path / "m")
    assert problem.startswith(f"{norm.name}: cannot be read as safetensors (") and other == (
        f"{head.name}: {LM}layers.0.mlp.gate.weight: expected float32 [8, 128], found float32 [3, 2]"
    )
    assert [p.name for p in tmp_path.iterdir()] == ["hf"]


def test_changed_chunks_of_our_own_form(folders_of, tmp_path):
    folder = pathlib.Path(shutil.copytree(folders_of / "orbax", tmp_path / "orbax"))
    flipped = ("layers.0.self_attn.o_proj.weight/c/1/0", "layers.2.mlp.experts.gate_up_proj/c/7/0/0")
    for name in flipped:
        file = folder / "params" / "state" / name
        data = file.read_bytes()
        file.write_bytes(data[:9] + bytes([data[9] ^ 1]) + data[10:])
    assert problems_of(folder, tmp_path / "m") == [
        f"params/state/{name}: its CRC-32C differs: the content has changed; {HELP}" for name in flipped
    ]
    assert not (tmp_path / "m").exists()


def test_a_file_that_shrinks_meanwhile(hf, tmp_path):
    file = file_of(hf, "norm.weight")

    def progress(done, total):
        os.truncate(file, 100)

    assert problems_of(hf, tmp_path / "m", progress=progress) == [
        f"{file.name}: shorter than before; something writes to it, download it again"
    ]


def test_disk_space_first(hf, tmp_path, monkeypatch):
    needed = sum(spec.nbytes for spec in weights.parameter_specs(SMALL).values()) + convert._SPARE_BYTES
    free = needed - 1
    monkeypatch.setattr(convert.shutil, "disk_usage", lambda path: SimpleNamespace(free=free))
    assert problems_of(hf, tmp_path / "below" / "m") == [
        f"{tmp_path}: expected {needed:,} free bytes, found {needed - 1:,}; free some or use another disk"
    ]
    assert [p.name for p in tmp_path.iterdir()] == ["hf"]
    free = needed
    with pytest.MonkeyPatch.context() as patch:
        stopping(patch, OrbaxTarget, "write", 30)
        with pytest.raises(Stop):
            convert_checkpoint(hf, tmp_path / "m")
    free = needed - 1  # what is there already needs no more
    convert_checkpoint(hf, tmp_path / "m")


@pytest.mark.parametrize("to", ["hf", "orbax"])
def test_a_disk_that_fills_up(folders_of, tmp_path, monkeypatch, to):
    """The real thing: a limit on the size of files, which the kernel enforces."""
    import resource

    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (30_000, old[1]))
    try:
        (problem,) = problems_of(folders_of / "orbax", tmp_path / "m", to=to)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old)
    assert "File too large" in problem and problem.endswith(
        f"what is written stays in {tmp_path / '.m.partial'}: the same call goes on with it"
    )
    convert_checkpoint(folders_of / "orbax", tmp_path / "m", to=to)
    assert same_bytes(weights.load(tmp_path / "m")[1], weights.load(folders_of / "orbax")[1])


# --- loading --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["orbax", "hf"])
@pytest.mark.parametrize("count", [1, 2, 8])
def test_every_device_reads_its_slices_only(folders_of, quantised, monkeypatch, kind, count):
    read, steps = [], []
    source = weights.orbax_io.OrbaxSource if kind == "orbax" else SafetensorsSource
    real = source.rows
    monkeypatch.setattr(source, "rows", lambda self, *a: (read.append(a), real(self, *a))[1])
    mesh = make_mesh(count)
    params = weights.load(folders_of / kind, mesh, progress=lambda *a: steps.append(a))[1]
    assert same_bytes(params, quantised)
    expected = set()
    for name, spec in weights.parameter_specs(SMALL).items():
        share = spec.shape[0] // (count if spec.placement == "expert" else 1)
        expected |= {(name, start, start + share) for start in range(0, spec.shape[0], share)}
    assert set(read) == expected and len(read) == len(expected)
    total = sum(a.nbytes for a in params.values())
    assert steps[0] == (0, total) and steps[-1] == (total, total) and steps == sorted(steps)


def test_loading_can_be_interrupted(folders_of, monkeypatch):
    read = []
    real = SafetensorsSource.rows
    monkeypatch.setattr(
        SafetensorsSource, "rows", lambda self, *a: (read.append(a), time.sleep(0.01), real(self, *a))[2]
    )

    def progress(done, total):
        if done:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        weights.load(folders_of / "hf", make_mesh(8), progress=progress)
    assert 1 <= len(read) < 40  # of 192


# --- the command ----------------------------------------------------------------------------------------------------


def command(*arguments, code=0):
    with pytest.MonkeyPatch.context() as patch:  # this process has its devices already
        patch.setattr("muse_jax.cli._prepare_cpu", lambda devices: None)
        patch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
        done = CliRunner().invoke(app, ["convert", *map(str, arguments)])
    assert done.exit_code == code, done.output
    return done


def test_command(folders_of, tmp_path):
    done = command(folders_of / "hf", tmp_path / "m")
    assert tree(tmp_path / "m") == tree(folders_of / "orbax")
    assert re.search(r"^checkpoint +.*/m, orbax, \d\.\d MB$", done.stdout, re.M) and "left out" not in done.stdout
    assert re.search(r"^converted \d\.\d MB in \d+\.\d s \(\d+\.\d [kMG]?B/s\)$", done.stderr, re.M)
    with pytest.MonkeyPatch.context() as patch:
        stopping(patch, FileWriter, "write", 30)
        with pytest.raises(Stop):
            convert_checkpoint(folders_of / "orbax", tmp_path / "meta", to="meta")
    done = command(folders_of / "orbax", tmp_path / "meta", "--to", "meta")
    assert re.search(r"^of earlier runs +1\.\d MB$", done.stdout, re.M)
    assert hf_names.ROW_ORDER_KEY in next(iter(open_file(tmp_path / "meta" / "model.safetensors").values())).metadata
    rewrite(
        tmp_path / "meta" / "model.safetensors",
        lambda found: found.update({"model.vision_tower.a": np.ones(5, np.float32)}),
    )
    done = command(tmp_path / "meta", tmp_path / "back", "--source-rows", "meta")
    assert re.search(r"^left out +1 tensors, 20 B, which", done.stdout, re.M)
    assert tree(tmp_path / "back") == tree(folders_of / "orbax")
    failed = command(tmp_path / "meta", tmp_path / "back", code=1)
    assert isinstance(failed.exception, CheckpointError)  # main() prints it


def test_bar_on_a_terminal():
    """Bytes, rate and time left; what an earlier run did is no progress. It goes away; one line stays."""
    console = Console(force_terminal=True, file=io.StringIO(), width=120, color_system=None)
    with progress_bar(console, "converting", "converted") as show:
        show(7_000_000_000, 20_000_000_000)
        time.sleep(0.2)
        show(13_500_000_000, 20_000_000_000)
        time.sleep(0.2)
        show(20_000_000_000, 20_000_000_000)
    text = console.file.getvalue()
    assert re.search(r"converting .*13\.5/20\.0 GB .*GB/s .*0:00:\d\d", text), text
    assert re.search(r"converted 13\.0 GB in 0\.[4-9] s \(\d+\.\d GB/s\)\n$", text)
    with progress_bar(console, "loading", "loaded"):
        pass  # nothing done, nothing said
    assert "loaded" not in console.file.getvalue()


# --- quantisation ---------------------------------------------------------------------------------------------------


def with_unit_input_scales(params):
    return {n: jnp.ones_like(a) if n.endswith("_input_scale") else a for n, a in params.items()}


def test_quantised_on_the_way(tmp_path, monkeypatch):
    """As the oracle quantises the same masters, in the layers that the configuration says; also into safetensors."""
    use_oracle_quantiser(monkeypatch)
    masters, expected = (weights.random_params(SMALL, 5, quantized=q) for q in (False, True))
    expected = with_unit_input_scales(expected)
    weights.save(tmp_path / "masters", SMALL, masters)
    weights.save(tmp_path / "expected", SMALL, expected)
    weights.export_hf(tmp_path / "expected hf", SMALL, expected, max_shard_bytes=300_000)
    for at in (20, 30, 15, 15):  # also between codes and their scales
        with pytest.MonkeyPatch.context() as patch:
            stopping(patch, OrbaxTarget, "write", at)
            with pytest.raises(Stop):
                convert_checkpoint(tmp_path / "masters", tmp_path / "ours", to="orbax", quantize=True)
    convert_checkpoint(tmp_path / "masters", tmp_path / "ours", to="orbax", quantize=True)
    to_hf(tmp_path / "masters", tmp_path / "hf", quantize=True)
    assert tree(tmp_path / "ours") == tree(tmp_path / "expected")
    assert tree(tmp_path / "hf") == tree(tmp_path / "expected hf")
    assert problems_of(tmp_path / "hf", tmp_path / "x", quantize=True) == [
        "no layer has bf16 experts that are to be NVFP4; leave it out"
    ]


def test_quantised_by_default(tmp_path, monkeypatch):
    """A plain bf16 checkpoint: all layers but the first and the last. Experts one by one; native arithmetic."""
    plain = SMALL.replace(expert_formats=("bf16",) * 3)
    masters = weights.random_params(SMALL, 7)
    weights.export_hf(tmp_path / "hf", plain, masters)
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    del config["muse_jax"]
    (tmp_path / "hf" / "config.json").write_text(json.dumps(config))

    def apart(found):
        for key in [key for key in found if key.endswith(("gate_up_proj", "down_proj"))]:
            whole, prefix = found.pop(key), key.rpartition(".")[0]
            for e, w in enumerate(whole):
                parts = dict(zip(("gate", "up"), np.split(w, 2), strict=True)) if "gate" in key else {"down": w}
                found |= {f"{prefix}.{e}.{kind}_proj.weight": part.copy() for kind, part in parts.items()}

    rewrite(tmp_path / "hf" / "model.safetensors", apart)
    done = command(tmp_path / "hf", tmp_path / "m", "--quantize")
    assert "orbax" in done.stdout
    found, params = weights.load(tmp_path / "m")
    assert found.expert_formats == ("bf16", "nvfp4", "bf16")
    assert same_bytes(params, with_unit_input_scales(weights.random_params(SMALL, 7, quantized=True)))


def test_masters_that_are_no_numbers(tmp_path):
    masters = weights.random_params(SMALL, 7)
    weights.export_hf(tmp_path / "hf", SMALL, masters)
    key = LM + "layers.1.mlp.experts.gate_up_proj"

    def damage(found):
        found[key][[2, 6], 100, 9] = np.inf

    rewrite(tmp_path / "hf" / "model.safetensors", damage)
    assert problems_of(tmp_path / "hf", tmp_path / "m", quantize=True) == [
        f"model.safetensors: {key}: expected finite numbers, found 2 other(s), the first one inf at [2, 100, 9]"
    ]
