"""The CUDA kernels without a GPU: tests of the fused calls once more, with the kernels in the simulator.

Each process has its own order of warps and of copies, and its own number of blocks.
"""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
PARITY, EDGES, TREES = "test_decode_parity.py::", "test_decode_edges.py::", "test_decode_trees.py::"
DRAFT = "test_draft_call.py::"
RUNS = {  # blocks of a rank, seed: tests
    (9, 1): [PARITY + "test_wide_experts[nvfp4]", EDGES + "test_all_experts_equal", DRAFT + "test_random_drafts"],
    (11, 2): [TREES + "test_one_path_against_the_oracle", DRAFT + "test_edges", "simulator"],
}
SLOW = {
    (8, 3): [PARITY + "test_random_models[0]", PARITY + "test_random_models[1]", PARITY + "test_wide_experts"],
    (13, 4): [EDGES + f"test_nan_{where}" for where in ("stays_in_its_sequence[model-0x7fff]", "router_keys")],
    (10, 5): [TREES + f"test_{what}" for what in ("inactive_rows_yield_zeros", "two_sequences_with_trees_in_one_step")],
}


RACES = [PARITY + "test_wide_experts[nvfp4]", EDGES + "test_all_experts_equal", DRAFT + "test_random_drafts",
         TREES + "test_one_path_against_the_oracle"]  # fmt: skip
"""With the build that looks for races, which is four times slower."""


def run_tests(tests: list[str], tmp_path: Path, blocks: int, seed: int, **environment: str) -> None:
    path = os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "simulated", "-p", "no:cacheprovider", "-q", "-x", "-s",
         f"--basetemp={tmp_path / 'simulated'}", *(str(TESTS / test) for test in tests)],
        cwd=TESTS.parent, capture_output=True, text=True, timeout=1800,
        env=os.environ | environment | {
            "PYTHONPATH": path, "MUSE_SIMULATOR_BLOCKS": str(blocks), "MUSE_SIMULATOR_SEED": str(seed),
            "MUSE_SIMULATOR_MULTIPROCESSORS": str(blocks),  # where no communicator is made
        },
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-6000:]


@pytest.mark.parametrize("run", [*RUNS, *(pytest.param(run, marks=pytest.mark.slow) for run in SLOW)], ids=str)
def test_kernels(run, tmp_path):
    assert importlib.util.find_spec("muse_jax._simulated"), "build with -C cmake.define.MUSE_SIMULATOR=ON, as make test"
    run_tests((RUNS | SLOW)[run], tmp_path, *run)


@pytest.mark.slow
def test_no_race(tmp_path):
    """No two threads of a block use a word of its shared memory in no order: vector clocks, see simulator/races.h."""
    built = tmp_path / "built"
    subprocess.run(
        [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", built, "-C",
         f"build-dir={tmp_path / 'build'}", "-C", "cmake.define.MUSE_SIMULATOR=RACES", TESTS.parent],
        check=True, timeout=1800,
    )  # fmt: skip
    run_tests(RACES, tmp_path, 9, 7, MUSE_SIMULATOR_FOLDER=str(built / "muse_jax"))
