"""Puts the CUDA kernels, run by tests/simulator, in the place of the CPU's fused calls; before muse_jax is imported."""

import importlib.util
import sys
from types import ModuleType

import jax

FUSED = ("muse_decode_", "muse_draft_", "muse_accept_")


def install(library: str) -> ModuleType:
    """Every fused call on CPU devices from now on is a launch of simulated blocks.

    Args:
        library: the file that CMake target `simulated` made.
    """
    spec = importlib.util.spec_from_file_location("muse_jax._cuda", library)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    handlers = {name: capsule for name, capsule in module.handlers().items() if name.startswith(FUSED)}
    register = jax.ffi.register_ffi_target

    def registered(name, capsule, platform):
        register(name, handlers.pop(name, capsule), platform=platform)

    jax.ffi.register_ffi_target = registered
    import muse_jax._native
    from muse_jax import comm
    from muse_jax.speculative import dflash_call

    assert not handlers, f"calls that the CPU module does not have: {sorted(handlers)}"
    jax.ffi.register_ffi_target = register
    muse_jax._native.PLATFORMS = ("cpu", "CUDA")
    comm._cuda = lambda: module
    comm.Communicator._shares = lambda self: True
    dflash_call._on_gpu = lambda draft: True
    sys.modules["muse_jax._cuda"] = module
    return module
