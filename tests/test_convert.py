"""Conversion: the same bytes in every form, after every interruption, and everything that is wrong named at once."""

import io
import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
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
from muse_jax.tokenizer import byte_tokenizer
from muse_jax.weights import convert, convert_checkpoint, folders, hf_names, transfer
from muse_jax.weights.orbax_io import OrbaxTarget
from muse_jax.weights.safetensors_file import FileWriter, open_file
from muse_jax.weights.safetensors_io import INDEX_FILE, SafetensorsSource

ROOT = pathlib.Path(__file__).parent.parent
LM = "model.language_model."
HELP = "copy the checkpoint again, or make it anew"


@pytest.fixture(scope="module", autouse=True)
def small_pieces():
    """So that a small model has as many pieces as a large one."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transfer, "PIECE_BYTES", 70_000)
        patch.setattr(transfer, "_WHOLE_BYTES", 10_000)
        yield


@pytest.fixture(scope="module")
def quantised():
    with pytest.MonkeyPatch.context() as patch:
        use_oracle_quantiser(patch)
        return weights.random_params(SMALL, 5, quantized=True)


@pytest.fixture(scope="module")
def folders_of(quantised, tmp_path_factory):
    """The same checkpoint as saved and as exported."""
    path = tmp_path_factory.mktemp("convert")
    weights.save(path / "orbax", SMALL, quantised, byte_tokenizer())
    weights.export_hf(path / "hf", SMALL, quantised, byte_tokenizer(), max_shard_bytes=300_000)
    return path


@pytest.fixture
def hf(folders_of, tmp_path):
    return pathlib.Path(shutil.copytree(folders_of / "hf", tmp_path / "hf"))


def to_hf(source, target, **options):
    return convert_checkpoint(source, target, max_shard_bytes=300_000, **options)


def problems_of(*arguments, **options) -> list[str]:
    with pytest.raises(CheckpointError) as caught:
        convert_checkpoint(*arguments, **options)
    return list(caught.value.problems)


def rewrite(file, change):
    found = {key: np.array(t.read()) for key, t in open_file(file).items()}
    change(found)
    save_file(found, file)


def file_of(folder, name):
    return folder / json.loads((folder / INDEX_FILE).read_text())["weight_map"][LM + name]


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


# --- interruptions --------------------------------------------------------------------------------------------------


class Stop(BaseException):
    """Not an Exception: no handler of ours may catch it."""


def stopping(monkeypatch, target, name, at):
    """Makes call number `at` of a function raise, before or after it has done its work."""
    real, calls = getattr(target, name), 0

    def call(*arguments, **options):
        nonlocal calls
        calls += 1
        if calls == at + 1:
            raise Stop
        return real(*arguments, **options)

    monkeypatch.setattr(target, name, call)


POINTS = [(OrbaxTarget, "write"), (folders.ResumableFolder, "record"), (OrbaxTarget, "finish"), (os, "rename"),
          (convert.shutil, "copyfile"), (folders.shutil, "rmtree")]  # fmt: skip


@pytest.mark.parametrize(("target", "name"), POINTS, ids=lambda p: getattr(p, "__name__", p))
def test_goes_on_where_it_was(folders_of, tmp_path, target, name):
    """Stopped at several calls of everything that changes the disk."""
    final = tmp_path / "m"
    for at in (0, 3, 60) if name in ("write", "record") else (0,):
        with pytest.MonkeyPatch.context() as patch:
            stopping(patch, target, name, at)
            with pytest.raises(Stop):
                convert_checkpoint(folders_of / "hf", final)
        assert final.exists() == (name == "rmtree")
    assert convert_checkpoint(folders_of / "hf", final).resumed_bytes > 0
    assert tree(final) == tree(folders_of / "orbax") and [p.name for p in tmp_path.iterdir()] == ["m"]


@pytest.mark.parametrize("left", [("plan.json", "journal.txt"), ("plan.json",), ("journal.txt",), ()])
def test_stopped_while_it_cleared_up(folders_of, tmp_path, left):
    with pytest.MonkeyPatch.context() as patch:
        stopping(patch, folders.shutil, "rmtree", 0)
        with pytest.raises(Stop):
            convert_checkpoint(folders_of / "hf", tmp_path / "m")
    for name in {"plan.json", "journal.txt"} - {*left}:
        (tmp_path / ".m.partial" / name).unlink()
    convert_checkpoint(folders_of / "hf", tmp_path / "m")
    assert tree(tmp_path / "m") == tree(folders_of / "orbax") and [p.name for p in tmp_path.iterdir()] == ["m"]


def test_to_safetensors_goes_on_where_it_was(folders_of, tmp_path, monkeypatch):
    final, resumed = tmp_path / "m", []
    for at in (0, 1, 30, 40):
        with pytest.MonkeyPatch.context() as patch:
            stopping(patch, FileWriter, "write", at)
            with pytest.raises(Stop):
                to_hf(folders_of / "orbax", final)
        assert not final.exists()
    written = []
    real = FileWriter.write
    monkeypatch.setattr(FileWriter, "write", lambda *a: (written.append(a[1]), real(*a))[1])
    resumed = to_hf(folders_of / "orbax", final).resumed_bytes
    assert resumed > 0 and len(written) < len(list(transfer.pieces(weights.parameter_specs(SMALL)))) - 65
    assert tree(final) == tree(folders_of / "hf") and [p.name for p in tmp_path.iterdir()] == ["m"]


@settings(max_examples=2)
@given(st.integers(0, 1 << 20))
def test_cut_off_journals(folders_of, tmp_path_factory, cut):
    """A journal that ends anywhere: what it does not say is done again."""
    folder = tmp_path_factory.mktemp("cut")
    with pytest.MonkeyPatch.context() as patch:
        stopping(patch, OrbaxTarget, "finish", 0)
        with pytest.raises(Stop):
            convert_checkpoint(folders_of / "hf", folder / "m")
    journal = folder / ".m.partial" / "journal.txt"
    os.truncate(journal, cut % journal.stat().st_size)
    convert_checkpoint(folders_of / "hf", folder / "m")
    assert tree(folder / "m") == tree(folders_of / "orbax")
    shutil.rmtree(folder)


def test_changed_source(hf, folders_of, quantised, tmp_path):
    """What came from a file that is another one now is read again, and only that."""
    with pytest.MonkeyPatch.context() as patch:
        stopping(patch, OrbaxTarget, "finish", 0)
        with pytest.raises(Stop):
            convert_checkpoint(hf, tmp_path / "m")
    file = file_of(hf, "layers.1.mlp.gate.weight")
    rewrite(file, lambda found: found[LM + "layers.1.mlp.gate.weight"].__setitem__((2, 3), 7.5))
    read = []
    real = SafetensorsSource.rows
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SafetensorsSource, "rows", lambda self, *a: (read.append(a[0]), real(self, *a))[1])
        convert_checkpoint(hf, tmp_path / "m")
    assert {LM + name for name in read} == set(open_file(file)) - {"lm_head.weight"}
    params = weights.restore(tmp_path / "m")[1]
    assert float(params["layers.1.mlp.gate.weight"][2, 3]) == 7.5
    assert [n for n in params if not np.array_equal(params[n], quantised[n])] == ["layers.1.mlp.gate.weight"]


def test_another_conversion(folders_of, tmp_path):
    with pytest.MonkeyPatch.context() as patch:
        stopping(patch, FileWriter, "write", 20)
        with pytest.raises(Stop):
            to_hf(folders_of / "orbax", tmp_path / "m")
    before = tree(tmp_path)
    for options in ({"to": "meta", "max_shard_bytes": 300_000}, {"to": "hf", "max_shard_bytes": 400_000}):
        assert problems_of(folders_of / "orbax", tmp_path / "m", **options) == [
            f"{tmp_path / '.m.partial'} was begun as another conversion; give the same source and options as then, or "
            "remove that folder to start anew"
        ]
    assert tree(tmp_path) == before
    to_hf(folders_of / "orbax", tmp_path / "m")
    assert problems_of(folders_of / "orbax", tmp_path / "m") == ["exists already; choose another name, or remove it"]


def test_one_at_a_time(folders_of, tmp_path):
    inside = []

    def progress(done, total):
        if not inside:
            inside.extend(problems_of(folders_of / "hf", tmp_path / "m"))

    convert_checkpoint(folders_of / "hf", tmp_path / "m", progress=progress)
    partial = tmp_path / ".m.partial"
    assert inside == [f"another process is writing {partial}; wait for it, or stop it"]
    assert tree(tmp_path / "m") == tree(folders_of / "orbax")


SCRIPT = """
import sys
from muse_jax.weights import convert_checkpoint, transfer
source, target, transfer.PIECE_BYTES, shard = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
transfer._WHOLE_BYTES = 10_000
convert_checkpoint(source, target, max_shard_bytes=shard)
"""


def kill_and_resume(source, target, moments, piece, shard) -> list[int]:
    """Conversions killed after so many journal lines each; how many each found done. Ends with one left alone."""
    found = []
    journal = target.with_name(f".{target.name}.partial") / "journal.txt"
    for moment in [*moments, None]:
        found.append(journal.read_bytes().count(b"\n") if journal.exists() else 0)
        command = [sys.executable, "-c", SCRIPT, source, target, str(piece), str(shard)]
        process = subprocess.Popen(command, cwd=ROOT)
        if moment is not None:
            while process.poll() is None and (
                not journal.exists() or journal.read_bytes().count(b"\n") < found[-1] + moment
            ):
                time.sleep(0.0005)
            process.send_signal(signal.SIGKILL)
            assert not target.exists() or process.wait() == 0
        assert process.wait() in (0, -signal.SIGKILL)
    assert process.returncode == 0
    return found


def test_killed(folders_of, tmp_path):
    found = kill_and_resume(folders_of / "hf", tmp_path / "m", [40], 70_000, 1 << 30)
    assert found[0] == 0 and found[1] >= 40
    assert tree(tmp_path / "m") == tree(folders_of / "orbax") and [p.name for p in tmp_path.iterdir()] == ["m"]


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


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"to": "gguf"}, "to: given 'gguf', allowed: 'orbax', 'hf', 'meta', or nothing"),
        ({"source_rows": "x"}, "source_rows: given 'x', allowed: 'hf', 'meta', or nothing"),
        ({"source_rows": "hf"}, "source_rows: given 'hf', but our own form has one order only"),
    ],
)
def test_arguments(folders_of, tmp_path, options, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        convert_checkpoint(folders_of / "orbax", tmp_path / "m", **options)
    with pytest.raises(CheckpointError, match="no such folder"):
        convert_checkpoint(tmp_path / "none", tmp_path / "m")


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
