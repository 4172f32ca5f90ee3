"""Which devices the bitwise guarantee was proven on. This module alone decides; whoever reports results quotes it."""

from collections.abc import Iterable
from typing import Any

from jax.sharding import Mesh

BITWISE = "bitwise"

_PROVEN = frozenset({"cpu", "9.0"})  # the CPU backend and compute capability 9.0 (Hopper), docs/numerics.md section 4


def guarantee(devices: "Mesh | Iterable[Any]") -> str:
    """What the numerics contract is worth on these devices.

    Args:
        devices: a mesh, or the devices themselves.

    Returns:
        "bitwise" where decoding was compared on every device's architecture (the CPU, and CUDA's compute capability
        9.0); otherwise a sentence such as "not bitwise: NVIDIA B200 was never compared".

    Raises:
        ValueError: no devices, or something else.
    """
    found = list(devices.devices.flat if isinstance(devices, Mesh) else devices)
    if not found or not all(hasattr(device, "platform") for device in found):
        raise ValueError(f"devices: given {devices!r:.80}, expected a mesh or JAX devices, such as jax.devices() gives")
    unknown = sorted({d.device_kind for d in found if _architecture(d) not in _PROVEN})
    if not unknown:
        return BITWISE
    return f"not bitwise: {' and '.join(unknown)} {'was' if len(unknown) == 1 else 'were'} never compared"


def _architecture(device: Any) -> str | None:
    return "cpu" if device.platform == "cpu" else getattr(device, "compute_capability", None)
