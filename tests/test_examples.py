"""The examples run as they stand and say what they promise."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SAYS = {
    "decode_in_a_scan.py": "generate gives the same tokens",
    "check_numerics.py": "max |log-probability of the trainer - of the sampler|: 0.0",
    "benchmark.py": "8 x cpu: 0 of ",
}


def run(*command):
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.run([sys.executable, *command], capture_output=True, text=True, timeout=300, env=environment)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    path = tmp_path_factory.mktemp("checkpoints") / "tiny"
    done = run(ROOT / "checkpoints/make_tiny.py", path)
    assert done.returncode == 0, done.stderr
    return path


def test_all_examples_are_run():
    assert {path.name for path in (ROOT / "examples").glob("*.py")} == set(SAYS)


@pytest.mark.parametrize("name", SAYS)
def test_example(checkpoint, name):
    done = run(ROOT / "examples" / name, checkpoint)
    assert done.returncode == 0, done.stdout + done.stderr
    assert SAYS[name] in done.stdout
