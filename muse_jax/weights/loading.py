"""Parameters from a source onto a mesh: every device's rows go straight to it, so that the host holds few of them."""

import contextlib
import threading
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
from jax.sharding import Mesh

from muse_jax.errors import CheckpointError
from muse_jax.mesh import check_mesh, make_mesh
from muse_jax.weights.names import Params, ParamSpec
from muse_jax.weights.safetensors_file import UnreadableFile
from muse_jax.weights.transfer import Progress, Source

_READERS = 8
_HOST_BYTES = 4 << 30


def load_source(source: Source, mesh: Mesh | None, headline: str, progress: Progress | None = None) -> Params:
    """Reads a source onto a mesh (default: `make_mesh()`), with the shardings of its specs.

    Rows are read for this process's devices only, once where several devices hold the same. What 8 threads are carrying
    to the devices is all that the host holds, up to 4 GiB, or one device's rows of one parameter if those are more.

    Raises:
        CheckpointError: lists every file that cannot be read and every tensor with impossible values.
    """
    mesh = make_mesh() if mesh is None else check_mesh(mesh)
    total = sum(spec.nbytes for spec in source.specs.values())
    unreadable: list[str] = []
    params: Params = {}
    budget = _Budget(_HOST_BYTES)
    done = 0

    def carry(name: str, start: int, stop: int, devices: list[Any]) -> list[jax.Array]:
        """Reads rows and waits until they are on their devices."""
        spec = source.specs[name]
        with budget.hold(spec.nbytes // spec.shape[0] * (stop - start)):
            try:
                rows = source.rows(name, start, stop)
            except UnreadableFile as error:
                unreadable.append(str(error))
                return []
            if unreadable or source.problems:  # look for more problems, but stop filling memory
                return []
            return jax.block_until_ready([jax.device_put(rows, device) for device in devices])

    if progress is not None:
        progress(done, total)
    with _pool() as pool:
        running = {
            name: [pool.submit(carry, name, *task) for task in _tasks(spec, mesh)]
            for name, spec in source.specs.items()
        }
        for name, spec in source.specs.items():
            shards = [shard for future in running.pop(name) for shard in future.result()]
            done += spec.nbytes
            if progress is not None:
                progress(done, total)
            if unreadable or source.problems:
                params.clear()
            else:
                params[name] = jax.make_array_from_single_device_arrays(spec.shape, spec.sharding(mesh), shards)
    if unreadable or source.problems:
        raise CheckpointError(headline, [*sorted({*unreadable}), *source.problems])
    return params


@contextlib.contextmanager
def _pool() -> Iterator[ThreadPoolExecutor]:
    """Threads that start nothing new once the block is left by an exception, Ctrl-C say."""
    with ThreadPoolExecutor(_READERS) as pool:
        try:
            yield pool
        finally:
            pool.shutdown(cancel_futures=True)


class _Budget:
    """Bytes that threads share; whoever wants more than there are waits, unless nobody has any."""

    def __init__(self, limit: int):
        self._limit, self._used = limit, 0
        self._changed = threading.Condition()

    @contextlib.contextmanager
    def hold(self, count: int) -> Iterator[None]:
        with self._changed:
            self._changed.wait_for(lambda: not self._used or self._used + count <= self._limit)
            self._used += count
        try:
            yield
        finally:
            with self._changed:
                self._used -= count
                self._changed.notify_all()


def _tasks(spec: ParamSpec, mesh: Mesh) -> list[tuple[int, int, list[Any]]]:
    """(first row, last row + 1, this process's devices that hold them)."""
    devices: dict[tuple[int, int], list[Any]] = defaultdict(list)
    for device, index in spec.sharding(mesh).addressable_devices_indices_map(spec.shape).items():
        assert index is not None
        start, stop, _ = index[0].indices(spec.shape[0])
        devices[start, stop].append(device)
    return [(*rows, holders) for rows, holders in devices.items()]
