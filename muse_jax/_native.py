"""Loads the compiled modules and registers their handlers with XLA: once, on import, for every platform built."""

import importlib
import importlib.util

import jax

from muse_jax import _cpu


def _register() -> tuple[str, ...]:
    """Register all handlers; returns the platforms that were built."""
    modules = {"cpu": _cpu}
    if importlib.util.find_spec("muse_jax._cuda") is not None:  # absent from a CPU-only wheel
        modules["CUDA"] = importlib.import_module("muse_jax._cuda")
    for platform, module in modules.items():
        for name, capsule in module.handlers().items():
            jax.ffi.register_ffi_target(name, capsule, platform=platform)
    return tuple(modules)


PLATFORMS: tuple[str, ...] = _register()
"""Platforms whose custom calls this build holds: ``("cpu",)`` or ``("cpu", "CUDA")``."""
