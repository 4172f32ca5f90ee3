"""Doctor, the recorded results it compares with, and what is said where the guarantee was not proven."""

import dataclasses
import importlib
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from data.make_recorded import oracle
from decode_helpers import small

import muse_jax
from muse_jax import _native, cli, doctor, numerics_proof
from muse_jax.guarantee import BITWISE
from muse_jax.weights import random_params

ROOT = Path(__file__).parent.parent
RESULTS = "9,232"


def run(code, script="from muse_jax.cli import main\nmain()"):
    """`muse-jax doctor` as a user runs it, or with something planted before."""
    environment = {k: v for k, v in os.environ.items() if k not in ("XLA_FLAGS", "PJRT_NPROC")}
    done = subprocess.run(
        [sys.executable, "-c", script, "doctor"], capture_output=True, text=True, cwd=ROOT, env=environment, timeout=120
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout


# On this machine -----------------------------------------------------------------------------------------------------


def test_cpu():
    out = run(0)
    assert f"muse-jax {muse_jax.__version__}, Python 3." in out and f"jax {jax.__version__}, jaxlib " in out
    assert re.search(r"^built for +CPU", out, re.M) and re.search(
        r"^mesh sizes +1: yes, 2: yes, 4: yes, 8: yes$", out, re.M
    )
    assert re.search(rf"^8 x cpu +bitwise: yes \({RESULTS} results compared, 0 differ\)$", out, re.M)
    assert "problem" not in out


@pytest.mark.parametrize(
    ("function", "index"), [("exp", 17), ("to_e4m3", 3), ("fsum16_bf16", 1000), ("fsum16_fp16", 0)]
)
def test_planted_wrong_value_is_found(tmp_path, function, index):
    with np.load(numerics_proof.RECORDED) as data:
        arrays = dict(data)
    arrays[f"{function}.result"].reshape(-1).view(np.uint8)[index * arrays[f"{function}.result"].itemsize] ^= 1
    np.savez(tmp_path / "wrong.npz", **arrays)
    out = run(
        1,
        "from pathlib import Path\nfrom muse_jax import cli, numerics_proof\n"
        f"numerics_proof.RECORDED = Path({str(tmp_path / 'wrong.npz')!r})\ncli.main()",
    )
    assert f"bitwise: no ({RESULTS} results compared, 1 differ)" in out
    assert re.search(rf"^problem: .*: {function}, recorded input {index}: 0x\w+ instead of 0x\w+$", out, re.M)


# The recorded results ------------------------------------------------------------------------------------------------


def test_recorded_file_is_small_and_complete():
    assert numerics_proof.RECORDED.stat().st_size < 100_000
    expected = numerics_proof.recorded()
    assert [case.function for case, _ in expected] == list(numerics_proof.FUNCTIONS)
    assert f"{sum(len(result) for _, result in expected):,}" == RESULTS


def test_recorded_elementary_results_are_the_oracles():
    for case, result in numerics_proof.recorded():
        if not case.function.startswith("fsum16"):
            assert oracle(case.function, *case.operands).tobytes() == result.tobytes(), case.function


@pytest.mark.parametrize("kind", ["bf16", "fp16"])
def test_recorded_sums_are_the_h200s(kind):
    known = set()
    for dump in ("hopper_mma", "hopper_mma_edges"):
        with np.load(ROOT / "tests" / "data" / f"{dump}.npz") as data:
            a, b, c, d = (data[f"{kind}_{name}"] for name in "abcd")
        known |= {b"".join(x.tobytes() for x in tile) for tile in zip(c, a, b, d, strict=True)}
    with np.load(numerics_proof.RECORDED) as data:
        parts = [data[f"fsum16_{kind}.{name}"] for name in ("0", "1", "2", "result")]
    tiles = {b"".join(x.tobytes() for x in tile) for tile in zip(*parts, strict=True)}
    assert len(tiles) == 26 and tiles <= known


# On GPUs, imagined ---------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Gpu:
    local_hardware_id: int
    device_kind: str = "NVIDIA H200"
    compute_capability: str = "9.0"
    platform: str = "gpu"

    def memory_stats(self):
        return {"bytes_limit": 100 << 30}

    def __str__(self):
        return f"cuda:{self.local_hardware_id}"


@pytest.fixture
def machine(monkeypatch):
    """machine(gpus, ...) -> diagnosis where JAX has these GPUs; `compute` spoils the right results of a case."""
    cpus, real = jax.devices("cpu"), numerics_proof.compute

    def diagnose(gpus, reach=True, compute=lambda case, results: results, platforms=("cpu", "CUDA")):
        def computed(device, case):
            results = real(cpus[0], case)
            return compute(case, results) if device in gpus else results

        module = SimpleNamespace(
            architectures=lambda: "90a-real,100a-real",
            peer_access=lambda ordinals: [[reach or i == j for j in ordinals] for i in ordinals],
        )
        monkeypatch.setattr(muse_jax, "_cuda", module, raising=False)
        monkeypatch.setattr(_native, "PLATFORMS", platforms)
        monkeypatch.setattr(numerics_proof, "_COUNT", 256)
        monkeypatch.setattr(numerics_proof, "compute", computed)
        monkeypatch.setattr(doctor, "compute", computed)
        monkeypatch.setattr(jax, "devices", lambda backend=None: cpus if backend == "cpu" else gpus)
        return doctor.diagnose()

    return diagnose


def test_two_gpus(machine):
    found = machine([Gpu(0), Gpu(1)])
    assert found.problems == [] and found.facts["built for"] == "CPU; CUDA for sm_90a, sm_100a"
    assert found.facts["GPU peers"] == "all 2 reach each other"
    assert found.facts["mesh sizes"] == "1: yes, 2: yes, 4: no (2 here), 8: no (2 here)"
    for gpu in ("cuda:0", "cuda:1"):
        assert found.facts[gpu].startswith("NVIDIA H200, compute capability 9.0, 100.0 GiB for JAX; bitwise: yes (")
        assert found.facts[gpu].endswith(" results compared, 0 differ)")


def test_gpus_without_peer_access(machine):
    found = machine([Gpu(0), Gpu(1)], reach=False)
    assert found.facts["GPU peers"] == "cuda:0 cannot reach cuda:1; cuda:1 cannot reach cuda:0"
    assert found.facts["mesh sizes"].startswith("1: yes, 2: no (cuda:0 cannot reach cuda:1), 4: no (2 here)")


def test_one_gpu_that_differs(machine):
    def wrong(case, results):
        if (case.function, case.kind) != ("fsum16_fp16", "cancellation"):
            return results
        results = results.copy()
        results.view(np.uint32)[5] ^= 1
        return results

    found = machine([Gpu(0)], compute=wrong)
    assert found.facts["GPU peers"] == "one GPU" and ", 1 differ)" in found.facts["cuda:0"]
    assert "bitwise: no (" in found.facts["cuda:0"] and "bitwise: yes (" in found.facts["8 x cpu"]
    assert len(found.problems) == 1 and found.problems[0].startswith("cuda:0: fsum16_fp16, cancellation input 5: 0x")


def test_unknown_architecture(machine):
    found = machine([Gpu(0, "NVIDIA B200", "10.0")])
    assert found.problems == []
    assert re.search(r"; bitwise: untested \([\d,]+ results compared, 0 differ; ", found.facts["cuda:0"])
    assert found.facts["cuda:0"].endswith("; decoding is not bitwise: NVIDIA B200 was never compared)")


def test_module_without_code_for_this_gpu(machine):
    def fail(case, results):
        raise jax.errors.JaxRuntimeError("INTERNAL: numerics: no kernel image is available\nmore")

    found = machine([Gpu(0)], compute=fail)
    assert found.facts["cuda:0"].endswith("; bitwise: no (nothing was compared)")
    assert found.problems == [
        "cuda:0: the numerics proof does not run here: INTERNAL: numerics: no kernel image is available"
    ]


def test_gpus_without_the_module(machine):
    found = machine([Gpu(0), Gpu(1)], platforms=("cpu",))
    assert found.facts["built for"] == "CPU; without CUDA" and found.facts["mesh sizes"].startswith("none ")
    assert "bitwise: no (nothing was compared)" in found.facts["cuda:1"]
    assert (
        len(found.problems) == 1 and "built without CUDA; reinstall it where nvcc is on the PATH" in found.problems[0]
    )


# The guarantee -------------------------------------------------------------------------------------------------------


def test_guarantee():
    assert muse_jax.guarantee(muse_jax.make_mesh(2)) == muse_jax.guarantee(jax.devices("cpu")) == BITWISE == "bitwise"
    assert muse_jax.guarantee([Gpu(0), Gpu(1)]) == BITWISE
    b200 = Gpu(1, "NVIDIA B200", "10.0")
    assert muse_jax.guarantee([Gpu(0), b200, b200]) == "not bitwise: NVIDIA B200 was never compared"
    other = SimpleNamespace(platform="tpu", device_kind="TPU v9")
    assert muse_jax.guarantee([other, b200]) == "not bitwise: NVIDIA B200 and TPU v9 were never compared"


def test_results_carry_the_guarantee(monkeypatch):
    mesh = muse_jax.make_mesh(2)
    model = muse_jax.LanguageModel(small(), random_params(small(), 3, mesh), mesh)
    assert muse_jax.generate(model, [1, 2, 3], max_new_tokens=2).guarantee == BITWISE
    report = muse_jax.parity(model, [1, 2, 3])
    assert report.guarantee == BITWISE and cli._verdict(report).endswith("(3 positions)")

    monkeypatch.setattr(importlib.import_module("muse_jax.guarantee"), "_PROVEN", frozenset())
    stated = "not bitwise: cpu was never compared"
    assert muse_jax.generate(model, [1, 2, 3], max_new_tokens=2).guarantee == stated
    report = muse_jax.parity(model, [1, 2, 3])
    assert report.differing_bytes == 0 and cli._verdict(report).endswith(f"(3 positions); {stated}")
