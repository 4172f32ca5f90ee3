"""Ranks and devices: the one mesh axis, and how arrays lie on it.

There are always 8 ranks; a mesh of D devices gives each device 8/D consecutive ones (docs/architecture.md).
"""

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar, cast

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

RANKS = 8
RANKS_SHAPE = (RANKS, 2)  # of `ranks_array`
AXIS = "rank"
DEVICE_COUNTS = (8, 4, 2, 1)

_WHY = "8 ranks are shared out evenly"
_MORE_CPU_DEVICES = (
    "for 8 CPU devices set XLA_FLAGS=--xla_force_host_platform_device_count=8 in the environment, or call "
    "jax.config.update('jax_num_cpu_devices', 8), before JAX is first used"
)


def make_mesh(devices: "int | Sequence[Any] | None" = None) -> Mesh:
    """A one-axis mesh named "rank".

    Args:
        devices: None for as many of `jax.devices()` as possible (the largest of 8, 4, 2, 1), one of these numbers for
            the first so many, or the devices themselves, in rank order.

    Raises:
        ValueError: the number is not 1, 2, 4 or 8, or there are not so many devices, or one is named twice.
    """
    if devices is None:
        available = jax.devices()
        chosen = available[: next(count for count in DEVICE_COUNTS if count <= len(available))]
    elif isinstance(devices, int | np.integer) and not isinstance(devices, bool):
        _check_count(devices)
        available = jax.devices()
        if devices > len(available):
            raise ValueError(
                f"devices: given {devices}, but JAX has {len(available)} ({available[0].platform}); "
                f"ask for fewer, or {_MORE_CPU_DEVICES}"
            )
        chosen = available[:devices]
    else:
        if isinstance(devices, str | bool) or not isinstance(devices, Sequence | np.ndarray):
            raise TypeError(
                f"devices: given {devices!r}, expected a number (1, 2, 4 or 8), a list of devices, or nothing"
            )
        chosen = list(devices)
        strange = [d for d in chosen if not isinstance(d, jax.Device)]
        if strange:
            raise TypeError(f"devices: given {strange[0]!r}, expected JAX devices, such as jax.devices() gives")
        _check_count(len(chosen))
        if len(set(chosen)) != len(chosen):
            raise ValueError(f"devices: given {chosen}, but each device may stand only once")
    return _mesh(chosen)


def _mesh(devices: Sequence[Any]) -> Mesh:
    # Not jax.make_mesh: its axes are Explicit in newer releases, and it may permute the devices.
    array = np.empty(len(devices), dtype=object)
    array[:] = devices
    return Mesh(array, (AXIS,), axis_types=(AxisType.Auto,))


def _check_count(count: int) -> None:
    if count not in DEVICE_COUNTS:
        raise ValueError(f"devices: given {count}, allowed: 1, 2, 4 or 8 ({_WHY})")


def check_mesh(mesh: Mesh) -> Mesh:
    """The mesh in the form the library uses: axis "rank" with Auto type, same devices in the same order.

    Args:
        mesh: any mesh with one axis of 1, 2, 4 or 8 devices, whatever the axis's name and type.

    Raises:
        TypeError: not a mesh. ValueError: another number of axes or devices.
    """
    if not isinstance(mesh, Mesh):
        raise TypeError(f"mesh: given a {type(mesh).__name__}, expected a jax.sharding.Mesh; make_mesh() makes one")
    if mesh.devices.ndim != 1:
        raise ValueError(
            f"mesh: given axes {dict(mesh.shape)}, expected exactly one axis, '{AXIS}', of 1, 2, 4 or 8 devices; "
            "make_mesh(list(mesh.devices.flat)) makes one"
        )
    if mesh.devices.size not in DEVICE_COUNTS:
        raise ValueError(f"mesh: given {mesh.devices.size} devices, allowed: 1, 2, 4 or 8 ({_WHY})")
    if mesh.axis_names == (AXIS,) and tuple(mesh.axis_types) == (AxisType.Auto,):
        return mesh
    return _mesh(list(mesh.devices.flat))


def on_gpu(mesh: Mesh) -> bool:
    """Whether the mesh's devices are GPUs; otherwise they are CPUs."""
    return next(iter(mesh.devices.flat)).platform != "cpu"


def ranks_per_device(mesh: Mesh) -> int:
    """How many consecutive ranks each device of the mesh holds: 8, 4, 2 or 1."""
    return RANKS // check_mesh(mesh).devices.size


def rank_sharding(mesh: Mesh) -> NamedSharding:
    """Leading axis (a multiple of 8) spread over the ranks."""
    return NamedSharding(check_mesh(mesh), PartitionSpec(AXIS))


def replicated(mesh: Mesh) -> NamedSharding:
    """The same array on every device."""
    return NamedSharding(check_mesh(mesh), PartitionSpec())


def ranks_array(mesh: Mesh, packing: int) -> jax.Array:
    """int32 [8, 2], sharded: the operand from which a handler learns which ranks its device holds.

    Column 0 is 0..7. Column 1 is `packing`, the same everywhere: it tells apart two sets of weights that one program
    steps at once.
    """
    ranks = np.stack([np.arange(RANKS), np.full(RANKS, packing)], axis=1).astype(np.int32)
    return jax.make_array_from_callback(ranks.shape, rank_sharding(mesh), lambda index: ranks[index])


Function = TypeVar("Function", bound=Callable[..., Any])


@contextlib.contextmanager
def own_mesh(mesh: Mesh) -> Iterator[None]:
    """Within it JAX's context mesh is this one, whatever the caller's is: `jax.set_mesh` of Explicit axes, say.

    Nor do the caller's settings of dtype and rank promotion hold there, which may be stricter than this code is.

    Raises:
        ValueError: inside shard_map or pmap, where a program sees one device.
    """
    if AxisType.Manual in jax.sharding.get_abstract_mesh().axis_types:
        raise ValueError(
            "muse_jax works on its whole mesh and cannot run inside shard_map or pmap; call it outside, or inside jit, "
            "scan or while_loop"
        )
    with (
        jax.sharding.use_abstract_mesh(mesh.abstract_mesh),
        jax.numpy_dtype_promotion("standard"),
        jax.numpy_rank_promotion("allow"),
    ):
        yield


def in_own_mesh(function: Function) -> Function:
    """Decorator: runs the function within `own_mesh` of its first argument's `mesh`."""
    name = next(iter(inspect.signature(function).parameters))

    @functools.wraps(function)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        with own_mesh((args[0] if args else kwargs[name]).mesh):
            return function(*args, **kwargs)

    return cast(Function, wrapped)
