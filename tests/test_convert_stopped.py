"""Conversions that are stopped anywhere, even killed: the next run goes on, and ends with the same bytes."""

import os
import pathlib
import shutil
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from convert_helpers import (
    LM,
    PIECE,
    WHOLE,
    Stop,
    file_of,
    make_folders,
    problems_of,
    rewrite,
    small_pieces,  # noqa: F401  (a fixture that works by being here)
    stopping,
    to_hf,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from weight_helpers import SMALL, tree

from muse_jax import weights
from muse_jax.weights import convert, convert_checkpoint, folders, transfer
from muse_jax.weights.orbax_io import OrbaxTarget
from muse_jax.weights.safetensors_file import FileWriter, open_file
from muse_jax.weights.safetensors_io import SafetensorsSource

ROOT = pathlib.Path(__file__).parent.parent


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
transfer._WHOLE_BYTES = int(sys.argv[5])
convert_checkpoint(source, target, max_shard_bytes=shard)
"""


def kill_and_resume(source, target, moments, shard) -> list[int]:
    """Conversions killed after so many journal lines each; how many each found done. Ends with one left alone."""
    found = []
    journal = target.with_name(f".{target.name}.partial") / "journal.txt"
    for moment in [*moments, None]:
        found.append(journal.read_bytes().count(b"\n") if journal.exists() else 0)
        command = [sys.executable, "-c", SCRIPT, source, target, str(PIECE), str(shard), str(WHOLE)]
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
    found = kill_and_resume(folders_of / "hf", tmp_path / "m", [40], 1 << 30)
    assert found[0] == 0 and found[1] >= 40
    assert tree(tmp_path / "m") == tree(folders_of / "orbax") and [p.name for p in tmp_path.iterdir()] == ["m"]
