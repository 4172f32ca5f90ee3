"""Ops under JAX's transformations: jit, loops, vmap, shard_map, remat."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from op_helpers import same
from op_operands import CHOSEN, GAIN, W2, W13, W, X

from muse_jax import ops


def block(x: jax.Array) -> jax.Array:
    """A few ops in a row, bf16 [..., 128] -> the same."""
    h = ops.rms_norm(x, GAIN, eps=1e-5)
    return ops.rms_norm(ops.gemm(h, W), eps=1e-8)


# --- Transformations --------------------------------------------------------------------------------------------------


def test_jit_gives_the_bits_of_eager() -> None:
    same(jax.jit(block)(X), block(X))


def test_leading_dimensions_are_free() -> None:
    same(block(X.reshape(2, 2, 2, 128)).reshape(8, 128), block(X))
    same(block(X[0]), block(X)[0])
    assert block(X[:0]).shape == (0, 128)


def test_scan_and_while_loop() -> None:
    expected = X
    for _ in range(3):
        expected = block(expected)
    scanned, _ = jax.jit(lambda x: jax.lax.scan(lambda c, _: (block(c), None), x, None, length=3))(X)
    same(scanned, expected)
    looped = jax.lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, block(c[1])), (0, X))
    same(looped[1], expected)


def test_vmap() -> None:
    same(jax.vmap(block)(X), block(X))
    weights = jnp.stack([W, W[::-1], W * 2])
    each = jnp.stack([ops.gemm(X, w) for w in weights])
    same(jax.vmap(ops.gemm, in_axes=(None, 0))(X, weights), each)
    grads = jax.vmap(jax.grad(lambda x: block(x).astype(jnp.float32).sum()))(X)
    same(grads[3], jax.grad(lambda x: block(x).astype(jnp.float32).sum())(X[3]))


@pytest.fixture(name="mesh")
def mesh_of_eight() -> Mesh:
    return Mesh(np.array(jax.devices()[:8]), ("rank",), axis_types=(AxisType.Auto,))


@pytest.mark.parametrize("check_vma", [True, False])
def test_shard_map(mesh: Mesh, check_vma: bool) -> None:
    """Rows over eight devices with replicated weights: the bits of one device, and summed weight gradients."""
    x = jax.device_put(X, NamedSharding(mesh, P("rank")))
    spread = jax.shard_map(
        lambda x, w: ops.gemm(block(x), w),
        mesh=mesh,
        in_specs=(P("rank"), P()),
        out_specs=P("rank"),
        check_vma=check_vma,
    )
    same(jax.jit(spread)(x, W), ops.gemm(block(X), W))

    def loss(f: Callable, x: jax.Array, w: jax.Array) -> jax.Array:
        return (f(x, w).astype(jnp.float32) ** 2).sum()

    actual = jax.jit(jax.grad(lambda w: loss(spread, x, w)))(W)
    expected = jax.grad(lambda w: loss(lambda x, w: ops.gemm(block(x), w), X, w))(W)
    np.testing.assert_allclose(*(np.asarray(g, np.float32) for g in (actual, expected)), rtol=0.05, atol=0.1)


def test_experts_over_eight_devices(mesh: Mesh) -> None:
    """Each device computes its own expert's pairs; the parts are disjoint and together the whole."""

    def local(x: jax.Array, chosen: jax.Array, w13: jax.Array, w2: jax.Array) -> jax.Array:
        first = jax.lax.axis_index("rank").astype(jnp.int32)
        return ops.expert_ffn(x, chosen, first, w13, w2)[None]

    spread = jax.shard_map(
        local, mesh=mesh, in_specs=(P(), P(), P("rank"), P("rank")), out_specs=P("rank"), check_vma=True
    )
    parts = np.asarray(jax.jit(spread)(X, CHOSEN, W13, W2))
    whole = np.asarray(ops.expert_ffn(X, CHOSEN, 0, W13, W2))
    owner = np.asarray(CHOSEN)
    for rank in range(8):
        same(parts[rank], np.where((owner == rank)[..., None], whole, np.zeros_like(whole)))


def test_remat_and_value_and_grad() -> None:
    loss = lambda x: (block(x).astype(jnp.float32) ** 3).sum()  # noqa: E731
    value, grad = jax.value_and_grad(loss)(X)
    value_2, grad_2 = jax.jit(jax.value_and_grad(jax.checkpoint(loss)))(X)
    np.testing.assert_allclose(value, value_2, rtol=1e-5)
    np.testing.assert_allclose(np.asarray(grad, np.float32), np.asarray(grad_2, np.float32), rtol=0.02, atol=1e-2)
