"""compute-sanitizer over the fused kernels, where it is installed and takes the device."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SANITIZER = shutil.which("compute-sanitizer") or shutil.which("/usr/local/cuda/bin/compute-sanitizer")

OPTIONS = [
    # XLA's kernels are not instrumented: they are not ours, and all together would take many minutes.
    "--kernel-name", "kernel_substring=muse",
    # XLA and we ask CUDA questions whose answer may be an error ("peer access is enabled already").
    "--report-api-errors", "no",
    "--target-processes", "application-only",
]  # fmt: skip
ENVIRONMENT = {
    # One allocation per array, so that memcheck knows where each ends; no arena, no graphs.
    "XLA_PYTHON_CLIENT_ALLOCATOR": "platform",
    "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
    "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),  # the tests' folders, which pytest added
    "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} --xla_gpu_enable_command_buffer=".strip(),
}
CLEAN = {
    "memcheck": r"ERROR SUMMARY: 0 errors",
    "racecheck": r"RACECHECK SUMMARY: ",
    "synccheck": r"ERROR SUMMARY: 0 errors",
}
RACE = re.compile(r"Race reported between .*\n(?:=+ +and .*\n)+")
# The weight ring's producer and readers meet at mbarriers where one lane arrives for its warp, which racecheck does not
# follow: it reports every chunk. What else it says counts.
RING = ("ring.cuh", "producer.cuh")


def races_outside_the_ring(output):
    """Reports of which no side is the ring's or a producer's."""
    return [race for race in RACE.findall(output) if not any(f"in {file}:" in race for file in RING)]


@pytest.mark.parametrize(
    ("tool", "program"),
    # racecheck follows every access to shared memory, also those of waits, and is the slowest by far.
    [("memcheck", "step"), ("memcheck", "draft"), ("synccheck", "tree"), ("racecheck", "tree"), ("racecheck", "draft")],
)
def test_sanitizer(gpu, tool, program):
    """On one GPU: the bits are the CPU's, and the tool finds nothing."""
    if SANITIZER is None:
        pytest.skip("compute-sanitizer is not installed")
    script = Path(__file__).with_name("sanitizer_script.py")
    failing = [] if tool == "racecheck" else ["--error-exitcode", "9"]
    command = [SANITIZER, "--tool", tool, *failing, *OPTIONS, sys.executable, str(script), program]
    done = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=os.environ | ENVIRONMENT, timeout=280
    )
    if refused := re.search(r"^=+ (.*not supported.*)$", done.stdout, re.MULTILINE | re.IGNORECASE):
        pytest.skip(f"compute-sanitizer: {refused[1]}")
    assert done.returncode == 0, done.stdout[-3000:]
    assert "same bytes" in done.stdout
    assert re.search(CLEAN[tool], done.stdout), done.stdout[-3000:]
    assert races_outside_the_ring(done.stdout) == []


def test_races_are_told_apart():
    """A race between two phases is found among those that name the ring."""
    report = (
        "========= Error: Race reported between {} access at muse::A::b()+0x10 in {}:1\n"
        "=========     and Read access at muse::C::d()+0x20 in {}:2 [16 hazards]\n"
        "=========     and Read access at muse::E::f()+0x30 in dense.cuh:3 [8 hazards]\n========= \n"
    )
    ring = report.format("Write", "ring.cuh", "dense.cuh") + report.format("Write", "expert_steps.cuh", "producer.cuh")
    assert races_outside_the_ring(ring) == []
    assert len(races_outside_the_ring(ring + report.format("Write", "rows_steps.cuh", "norms.cuh"))) == 1
