"""The wheel alone, in a virtual environment that knows nothing of the source tree: what a user installs.

`make test-slow`: builds the wheel and downloads what it depends on, minutes.
"""

import os
import re
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[1]


def run(*command, cwd):
    """Outside the tree, with no variable that could show the way back or make devices."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "XLA_", "PJRT_", "JAX_"))}
    done = subprocess.run([*map(str, command)], cwd=cwd, env=kept, capture_output=True, text=True, timeout=1800)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    run(sys.executable, "-m", "pip", "wheel", "--no-deps", "--wheel-dir", folder, ROOT, cwd=folder)
    (file,) = folder.glob("*.whl")
    return file


@pytest.fixture(scope="module")
def bare(wheel, tmp_path_factory):
    """The folder of the environment's commands."""
    folder = tmp_path_factory.mktemp("bare")
    venv.create(folder / "venv", with_pip=True)
    run(folder / "venv/bin/python", "-m", "pip", "install", "--quiet", wheel, cwd=folder)
    return folder / "venv/bin"


def test_what_is_in_it(wheel):
    """All Python files, typing markers, stubs of the native modules, recorded results, the licence; nothing else."""
    names = zipfile.ZipFile(wheel).namelist()
    tracked = subprocess.run(["git", "ls-files", "muse_jax"], cwd=ROOT, capture_output=True, text=True, check=True)
    inside = {name for name in names if name.startswith("muse_jax/")}
    native = {name for name in inside if name.endswith(".so")}
    assert inside - native == set(tracked.stdout.split())
    assert {"muse_jax/py.typed", "muse_jax/_cpu.pyi", "muse_jax/recorded.npz"} <= inside
    assert {name.split("/")[1].split(".")[0] for name in native} in ({"_cpu"}, {"_cpu", "_cuda"})
    beside = {re.sub(r"^muse_jax-[^/]*\.dist-info/", "", name) for name in set(names) - inside}
    assert beside == {"METADATA", "RECORD", "WHEEL", "entry_points.txt", "licenses/LICENSE"}


def test_it_runs(bare):
    """Imported from the environment; the doctor finds nothing; a text has the reference's bits."""
    where = run(bare / "python", "-c", "import muse_jax; print(muse_jax.__file__)", cwd=bare)
    assert Path(where.strip()).is_relative_to(bare.parent)
    assert re.search(r"bitwise: yes \([\d,]+ results compared, 0 differ\)", run(bare / "muse-jax", "doctor", cwd=bare))
    run(bare / "python", ROOT / "checkpoints/make_tiny.py", "tiny", cwd=bare)
    out = run(bare / "muse-jax", "generate", "tiny", "--max-new-tokens", 8, "--check", cwd=bare)
    assert re.search(r"differing bytes: 0 of [\d,]+ compared with the expert-parallel reference", out)
