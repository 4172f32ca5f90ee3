"""Meshes of every size, and what is refused."""

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, PartitionSpec

from muse_jax import mesh as M

HOW = "XLA_FLAGS=--xla_force_host_platform_device_count=8"


def test_default_takes_all_eight():
    mesh = M.make_mesh()
    assert mesh.axis_names == (M.AXIS,) == ("rank",)
    assert mesh.devices.shape == (8,) and list(mesh.devices.flat) == jax.devices()[:8]
    assert tuple(mesh.axis_types) == (AxisType.Auto,)


@pytest.mark.parametrize(("available", "expected"), [(1, 1), (2, 2), (3, 2), (5, 4), (7, 4), (8, 8)])
def test_default_takes_the_largest_possible(monkeypatch, available, expected):
    devices = jax.devices()[:available]
    monkeypatch.setattr(jax, "devices", lambda: devices)
    assert M.make_mesh().devices.size == expected


@pytest.mark.parametrize("count", [1, 2, 4, 8])
def test_sizes(count):
    for given in (count, np.int64(count), jax.devices()[:count], tuple(jax.devices()[:count])):
        mesh = M.make_mesh(given)  # type: ignore
        assert mesh.devices.size == count
        assert M.ranks_per_device(mesh) == 8 // count
        assert M.check_mesh(mesh) is mesh
        ranks = M.ranks_array(mesh, 3)
        assert ranks.dtype == np.int32 and np.array_equal(ranks, [[r, 3] for r in range(8)])
        assert ranks.sharding == M.rank_sharding(mesh)
        for shard, held in zip(ranks.addressable_shards, np.split(np.arange(8), count), strict=True):
            assert np.array_equal(shard.data[:, 0], held)


def test_device_order_is_kept():
    devices = jax.devices()[:4][::-1]
    assert list(M.make_mesh(devices).devices.flat) == devices


def test_too_few_devices_says_how_to_get_more(monkeypatch):
    devices = jax.devices()[:2]
    monkeypatch.setattr(jax, "devices", lambda: devices)
    with pytest.raises(ValueError, match=r"^devices: given 8, but JAX has 2 \(cpu\); ask for fewer, or ") as caught:
        M.make_mesh(8)
    assert HOW in str(caught.value) and "jax.config.update('jax_num_cpu_devices', 8)" in str(caught.value)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("name", ["rank", "model"])
@pytest.mark.parametrize("count", [1, 2, 4, 8])
def test_foreign_meshes_are_accepted(count, name, kind):
    foreign = Mesh(np.array(jax.devices()[:count]), (name,), axis_types=(kind,))
    mesh = M.check_mesh(foreign)
    assert mesh == M.make_mesh(count)
    assert M.rank_sharding(foreign) == M.rank_sharding(mesh)
    assert M.replicated(foreign).spec == PartitionSpec()
    assert np.array_equal(M.ranks_array(foreign, 3)[:, 0], np.arange(8))


def test_jax_make_mesh_is_accepted():
    assert M.check_mesh(jax.make_mesh((8,), ("x",))).axis_names == ("rank",)


def test_arrays_of_a_foreign_mesh_mix_with_ours():
    explicit = jax.make_mesh((8,), ("rank",), axis_types=(AxisType.Explicit,))
    ours = M.ranks_array(explicit, 3)
    assert int(jax.jit(lambda x: x.sum())(ours)) == 28 + 24
