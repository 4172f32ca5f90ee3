"""A pytest plugin (`-p simulated`, with tests/ on the path): the fused calls of all tests are the CUDA kernels.

tests/simulator runs them; what else the tests compute, and what they compare with, stays the CPU's.
"""

import functools
import importlib
import os
import sys
from collections import Counter

import jax

FUSED = ("muse_decode_", "muse_draft_", "muse_accept_")


def pytest_configure(config) -> None:
    """From now on every fused call on CPU devices is a launch of simulated blocks, as many for a rank as
    MUSE_SIMULATOR_BLOCKS says (8, the fewest, by default).

    MUSE_SIMULATOR_FOLDER: where another build of _simulated lies, such as the one that looks for races.
    """
    config.simulated = True
    register = jax.ffi.register_ffi_target
    replaced = []

    @functools.cache
    def simulated():  # while muse_jax is imported
        if folder := os.environ.get("MUSE_SIMULATOR_FOLDER"):
            sys.modules["muse_jax"].__path__.insert(0, folder)
        return importlib.import_module("muse_jax._simulated")

    def registered(name, capsule, platform):
        if platform == "cpu" and name.startswith(FUSED):
            capsule = simulated().handlers()[name]
            replaced.append(name)
        register(name, capsule, platform=platform)

    jax.ffi.register_ffi_target = registered
    import muse_jax._native

    jax.ffi.register_ffi_target = register
    assert len(replaced) >= len(FUSED), "imported before: what is registered stays"
    module = simulated()

    from muse_jax import comm
    from muse_jax.speculative import dflash_call

    create = module.create_communicator

    def created(device_of_rank, sizes, loopback=False):
        ranks = max(Counter(device_of_rank).values())  # of the fullest device
        os.environ["MUSE_SIMULATOR_MULTIPROCESSORS"] = str(ranks * int(os.environ.get("MUSE_SIMULATOR_BLOCKS", "8")))
        return create(device_of_rank, sizes, loopback)

    module.create_communicator = created
    muse_jax._native.PLATFORMS = ("cpu", "CUDA")
    comm._cuda = lambda: module
    comm.Communicator._shares = lambda self: True
    dflash_call._on_gpu = lambda draft: True
