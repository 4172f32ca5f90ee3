"""Loads the compiled modules and registers their handlers with XLA: once, on import, for every platform built."""

import importlib

import jax

from muse_jax import _cpu


def _register() -> tuple[str, ...]:
    """Register all handlers; returns the platforms that were built."""
    platforms = []
    modules = [("cpu", _cpu)]
    try:
        modules.append(("CUDA", importlib.import_module("muse_jax._cuda")))
    except ImportError:  # a CPU-only wheel
        pass
    for platform, module in modules:
        for name, capsule in module.handlers().items():
            jax.ffi.register_ffi_target(name, capsule, platform=platform)
        platforms.append(platform)
    return tuple(platforms)


PLATFORMS: tuple[str, ...] = _register()
"""Platforms whose custom calls this build holds: ``("cpu",)`` or ``("cpu", "CUDA")``."""
