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
    "--error-exitcode", "9",
    # Only the two kernels are instrumented: XLA's are not ours, and all together would take many minutes.
    "--kernel-name", "kernel_substring=decode_",
    # XLA and we ask CUDA questions whose answer may be an error ("peer access is enabled already").
    "--report-api-errors", "no",
    "--target-processes", "application-only",
]  # fmt: skip
ENVIRONMENT = {
    # One allocation per array, so that memcheck knows where each ends; no arena, no graphs.
    "XLA_PYTHON_CLIENT_ALLOCATOR": "platform",
    "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
    "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} --xla_gpu_enable_command_buffer=".strip(),
}
CLEAN = {
    "memcheck": r"ERROR SUMMARY: 0 errors",
    "racecheck": r"RACECHECK SUMMARY: 0 hazards displayed \(0 errors, 0 warnings\)",
    "synccheck": r"ERROR SUMMARY: 0 errors",
}


@pytest.mark.parametrize("tool", CLEAN)
def test_sanitizer(gpu, tool):
    """On one GPU: prefill, two steps, a tree; the bits are the CPU's, and the tool finds nothing."""
    if SANITIZER is None:
        pytest.skip("compute-sanitizer is not installed")
    script = Path(__file__).with_name("sanitizer_script.py")
    command = [SANITIZER, "--tool", tool, *OPTIONS, sys.executable, str(script)]
    done = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=os.environ | ENVIRONMENT, timeout=280
    )
    if refused := re.search(r"^=+ (.*not supported.*)$", done.stdout, re.MULTILINE | re.IGNORECASE):
        pytest.skip(f"compute-sanitizer: {refused[1]}")
    print(done.stdout[-3000:])
    assert done.returncode == 0, done.stdout[-3000:]
    assert "same bytes" in done.stdout
    assert re.search(CLEAN[tool], done.stdout)
