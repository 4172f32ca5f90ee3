"""Doctor: what is installed, which devices JAX sees, which guarantees hold on them. `muse-jax doctor` prints it."""

import dataclasses
import importlib.metadata
import itertools
import platform
from collections.abc import Sequence
from typing import Any

import jax

import muse_jax
from muse_jax import _native
from muse_jax.guarantee import BITWISE, guarantee
from muse_jax.mesh import DEVICE_COUNTS
from muse_jax.numerics_proof import Comparison, Expected, compare, compute, drawn, recorded

Pair = tuple[Any, Any]
"""Two devices."""


@dataclasses.dataclass(frozen=True)
class Diagnosis:
    """What `diagnose` found."""

    facts: dict[str, str]
    """Label -> finding, in the order of printing. Devices are labels too, such as "8 x cpu" and "cuda:0"."""
    problems: list[str]
    """What is wrong here; empty if nothing is."""


def diagnose() -> Diagnosis:
    """Look at versions, build and devices, and run a short form of the numerics proof on every backend (seconds).

    The CPU is compared with recorded results (an H200's fused sums among them, `muse_jax.numerics_proof`), every GPU
    with these and with the CPU.

    Raises:
        RuntimeError: JAX finds no CPU backend (JAX_PLATFORMS hides it), or CUDA cannot be asked about peers.
    """
    default, cpus = jax.devices(), jax.devices("cpu")
    others = [d for d in default if d.platform != "cpu"]
    unreachable = _unreachable_peers(others) if "CUDA" in _native.PLATFORMS else []
    facts = {
        "versions": _versions(),
        "built for": _built(),
        "GPU peers": _peers(others, unreachable),
        "mesh sizes": _mesh_sizes(default, unreachable),
    }
    problems: list[str] = []
    proof = recorded()
    facts[f"{len(cpus)} x cpu"] = _verdict(cpus[0], proof, problems)
    if others and "CUDA" not in _native.PLATFORMS:
        problems.append(
            f"JAX uses {others[0].device_kind} here, but this muse-jax was built without CUDA; reinstall it where nvcc "
            "is on the PATH"
        )
        facts |= {str(d): f"{_described(d)}; bitwise: no (nothing was compared)" for d in others}
    elif others:
        proof += [(case, compute(cpus[0], case)) for case in drawn()]
        facts |= {str(d): f"{_described(d)}; {_verdict(d, proof, problems)}" for d in others}
    return Diagnosis(facts, problems)


def _versions() -> str:
    packages = [f"{name} {importlib.metadata.version(name)}" for name in ("jax", "jaxlib", "flax")]
    return ", ".join([f"muse-jax {muse_jax.__version__}", f"Python {platform.python_version()}", *packages])


def _built() -> str:
    if "CUDA" not in _native.PLATFORMS:
        return "CPU; without CUDA"
    from muse_jax import _cuda

    # As CMake says it: "90a-real" is machine code for sm_90a.
    return f"CPU; CUDA for {', '.join('sm_' + a.removesuffix('-real') for a in _cuda.architectures().split(','))}"


def _described(device: Any) -> str:
    facts = [device.device_kind]
    if capability := getattr(device, "compute_capability", None):
        facts.append(f"compute capability {capability}")
    if limit := (device.memory_stats() or {}).get("bytes_limit"):
        facts.append(f"{limit / 2**30:.1f} GiB for JAX")
    return ", ".join(facts)


def _unreachable_peers(gpus: Sequence[Any]) -> list[Pair]:
    """Pairs whose first GPU cannot store to the second's memory, as decoding on both would have to."""
    from muse_jax import _cuda

    reach = _cuda.peer_access([d.local_hardware_id for d in gpus])
    pairs = itertools.product(enumerate(gpus), repeat=2)
    return [(a, b) for (i, a), (j, b) in pairs if i != j and not reach[i][j]]


def _peers(gpus: Sequence[Any], unreachable: list[Pair]) -> str:
    if len(gpus) < 2:
        return "one GPU" if gpus else "no GPU"
    if "CUDA" not in _native.PLATFORMS:
        return "unknown without the CUDA module"
    if unreachable:
        return "; ".join(f"{a} cannot reach {b}" for a, b in unreachable)
    return f"all {len(gpus)} reach each other"


def _mesh_sizes(devices: Sequence[Any], unreachable: list[Pair]) -> str:
    """Whether `make_mesh(size)`, which takes the first so many devices, can decode."""
    if devices[0].platform != "cpu" and "CUDA" not in _native.PLATFORMS:
        return "none on these devices without the CUDA module"
    findings = []
    for size in sorted(DEVICE_COUNTS):
        chosen = devices[:size]
        blocked = next(((a, b) for a, b in unreachable if a in chosen and b in chosen), None)
        if len(chosen) < size:
            findings.append(f"{size}: no ({len(devices)} here)")
        elif blocked:
            findings.append(f"{size}: no ({blocked[0]} cannot reach {blocked[1]})")
        else:
            findings.append(f"{size}: yes")
    return ", ".join(findings)


def _verdict(device: Any, proof: list[Expected], problems: list[str]) -> str:
    """Compare on this device; what is wrong is added to the problems."""
    try:
        found = compare(device, proof)
    except RuntimeError as error:  # a module without machine code for this GPU, say
        problems.append(f"{device}: the numerics proof does not run here: {str(error).splitlines()[0]}")
        return "bitwise: no (nothing was compared)"
    if found.first is not None:
        problems.append(f"{device}: {found.first}")
    return f"bitwise: {_answer(device, found)}"


def _answer(device: Any, found: Comparison) -> str:
    counted = f"{found.compared:,} results compared, {found.differing:,} differ"
    if found.differing:
        return f"no ({counted})"
    stated = guarantee([device])
    return f"yes ({counted})" if stated == BITWISE else f"untested ({counted}; decoding is {stated})"
