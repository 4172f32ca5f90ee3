"""The ceiling of everything here: how many bytes per second a GPU reads from its memory.

    python benchmarks/bandwidth.py

read_bandwidth.cu is compiled with nvcc on the spot and run in this process. Without nvcc, or on a GPU without bulk
copies, an XLA reduction stands in, which reads more slowly: the result says which it was.
"""

import ctypes
import dataclasses
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from stepping import gpus, timed

BYTES = 4 << 30
SOURCE = Path(__file__).with_name("read_bandwidth.cu")


@dataclasses.dataclass(frozen=True)
class Bandwidth:
    """What was measured, and how."""

    bytes_per_second: float
    method: str

    def __str__(self) -> str:
        """For printing."""
        return f"{self.bytes_per_second / 1e12:.2f} TB/s ({self.method})"


class Unavailable(Exception):
    """The kernel cannot be built or run here; the message says why."""


def compile_kernel(folder: Path, capability: str) -> Path:
    """read_bandwidth.cu as a shared library in `folder`, for a compute capability such as "9.0"."""
    if float(capability) < 9:
        raise Unavailable(f"compute capability {capability} has no bulk copies")
    nvcc = shutil.which("nvcc") or shutil.which("nvcc", path="/usr/local/cuda/bin")
    if nvcc is None:
        raise Unavailable("no nvcc on the PATH")
    library, number = folder / "read_bandwidth.so", capability.replace(".", "")
    command = [nvcc, "-O3", "-std=c++17", "-shared", "-Xcompiler", "-fPIC"]
    command += [f"-gencode=arch=compute_{number},code=sm_{number}", str(SOURCE), "-o", str(library)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise Unavailable("nvcc failed: " + (done.stderr or done.stdout).strip().splitlines()[0])
    return library


def kernel_bandwidth(device: Any) -> float:
    """By the kernel of read_bandwidth.cu."""
    with tempfile.TemporaryDirectory() as folder:
        library = ctypes.CDLL(str(compile_kernel(Path(folder), device.compute_capability)))
    library.read_bandwidth.argtypes, library.read_bandwidth.restype = [ctypes.c_int, ctypes.c_size_t], ctypes.c_double
    library.read_bandwidth_failure.restype = ctypes.c_char_p
    result = library.read_bandwidth(device.local_hardware_id, BYTES)
    if result <= 0:
        raise Unavailable(library.read_bandwidth_failure().decode())
    return result


def xla_bandwidth(device: Any) -> float:
    """By a maximum over an array."""
    with jax.default_device(device):
        x = jax.jit(lambda: jnp.arange(BYTES // 4, dtype=jnp.uint32) * jnp.uint32(0x9E3779B1))()
        read = jax.jit(jnp.max)
        return BYTES / timed(lambda: read(x), 20, 1).median


def measure(device: Any) -> Bandwidth:
    """The reading ceiling of one GPU, on which nothing else runs."""
    try:
        return Bandwidth(kernel_bandwidth(device), f"{SOURCE.name}, {BYTES >> 30} GiB")
    except Unavailable as why:
        how = f"an XLA reduction over {BYTES >> 30} GiB, BELOW THE TRUE CEILING, which flatters shares of it: {why}"
        return Bandwidth(xla_bandwidth(device), how)


if __name__ == "__main__":
    for gpu in gpus():
        print(f"{gpu.device_kind} {gpu.id}: {measure(gpu)}")
