"""Communicator: what the ranks of one mesh share on GPUs. Made before the first step, closed after the last."""

import dataclasses
import importlib

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh

from muse_jax import _native
from muse_jax.config import MuseSparkConfig
from muse_jax.mesh import RANKS, check_mesh, on_gpu


class Communicator:
    """Symmetric workspaces, peer access and preloaded kernels for 8 ranks on the GPUs of this process.

    Calls carry its small integer `key`, never a pointer. On the CPU backend nothing is shared and the key is 0. A step
    that waits longer than its limit breaks the communicator: later calls raise, `check()` says which rank waited where
    for whom, and `rebuild()` makes it usable again. Ranks in several processes of one host (`jax.distributed`) find
    each other through CUDA IPC handles; making, rebuilding and closing are then collective.
    """

    def __init__(self, config: MuseSparkConfig, mesh: Mesh):
        """Allocate and preload on every device of the mesh.

        Raises:
            RuntimeError: no CUDA module in this build, no peer access, no memory, or a kernel that does not fit; the
                message says which.
        """
        self._config, self._mesh = config, check_mesh(mesh)
        self.key: int = 0
        if self._shares():
            self._open()

    def _shares(self) -> bool:
        return on_gpu(self._mesh)

    def open_key(self) -> int:
        """The key that calls carry.

        Raises:
            ValueError: the communicator was closed.
        """
        if self._shares() and not self.key:
            raise ValueError(
                "the communicator of these weights was closed; rebuild() it, or repack the weights with an open one"
            )
        return self.key

    def _open(self) -> None:
        if "CUDA" not in _native.PLATFORMS:
            raise RuntimeError(
                "this muse-jax was built without CUDA; reinstall it where nvcc is on the PATH, or use CPU devices"
            )
        devices = list(self._mesh.devices.flat)
        owners = [devices[rank * len(devices) // RANKS] for rank in range(RANKS)]
        here = jax.process_index()
        self.key = _cuda().create_communicator(
            [d.local_hardware_id if d.process_index == here else -1 for d in owners],
            self.sizes(self._config),
        )
        if any(d.process_index != here for d in owners):
            # Every process's handles, [processes, 8 * 64]; a rank's are zeros everywhere but in its owner's.
            handles = np.frombuffer(_cuda().export_handles(self.key), np.uint8)
            everyone = np.asarray(multihost_utils.process_allgather(handles))
            _cuda().connect_communicator(self.key, everyone.max(axis=0).tobytes())
            multihost_utils.sync_global_devices("muse_jax communicator connected")

    @staticmethod
    def sizes(c: MuseSparkConfig) -> list[int]:
        """The numbers that workspaces and kernels depend on, as create_communicator takes them."""
        return [c.hidden_size, c.num_attention_heads, c.num_key_value_heads, c.moe_hidden_size, c.moe_intermediate_size,
                c.num_local_experts, c.num_experts_per_tok, c.vocab_size]  # fmt: skip

    def check(self) -> None:
        """Raise RuntimeError if a finished step gave up, saying which rank waited in which layer and phase for whom."""
        if self.key and (failure := _cuda().communicator_failure(self.key)):
            raise RuntimeError(f"a decode step failed: {failure}; rebuild the communicator")

    def rebuild(self) -> None:
        """Free everything and allocate it anew, under a new key; programs are compiled again for it."""
        if self._shares():
            self.close()
            self._open()

    def close(self) -> None:
        """Free the workspaces; block on all steps first. Later calls raise, until `rebuild()`."""
        if self.key:
            _cuda().destroy_communicator(self.key)
            self.key = 0


@dataclasses.dataclass(frozen=True)
class Session:
    """A communicator between two rebuilds: what JAX keeps compiled programs under, so it must never change.

    Equal sessions mean the same shared memory: programs compiled for one serve the other.
    """

    key: int
    communicator: Communicator = dataclasses.field(compare=False)


def _cuda():
    return importlib.import_module("muse_jax._cuda")
