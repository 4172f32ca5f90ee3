"""The library's fsum16 against what an H200's tensor cores returned."""

from __future__ import annotations

from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from op_helpers import same

from muse_jax import ops

DATA = Path(__file__).parent / "data"


@pytest.mark.parametrize("kind", ["bf16", "fp16"])
@pytest.mark.parametrize("dump", ["hopper_mma", "hopper_mma_edges"])
def test_fsum16_is_what_the_tensor_core_returned(dump: str, kind: str) -> None:
    with np.load(DATA / f"{dump}.npz") as data:
        a, b, c, d = (data[f"{kind}_{name}"] for name in "abcd")
    shape = c.shape  # [mma, 16 rows, 8 columns]
    a = np.broadcast_to(a[:, :, None, :], (*shape, 16)).reshape(-1, 16)
    b = np.broadcast_to(b[:, None, :, :], (*shape, 16)).reshape(-1, 16)
    acc = c.view(np.float32).reshape(-1)
    result = ops.numerics(f"fsum16_{kind}", jnp.asarray(acc), jnp.asarray(a), jnp.asarray(b))
    same(np.asarray(result).view(np.uint32), d.reshape(-1))


# An H200's answer to operands whose two largest products, of 2^223, cancel: the rest is below the grid.
CANCELLING = (
    0x0000015C,
    "bc77 2867 3553 fa04 3a81 fca5 c836 ea98 6fd2 85c9 755f 456a 84ae 8000 5257 c4d1",
    "43e7 424b d998 f4a0 f0c1 7200 e854 0e4d c215 aea2 4157 e94f 0e4c e132 5173 b048",
    0x00000000,
)


@pytest.mark.parametrize("scale", [1, -1])
def test_large_products_that_cancel(scale: int) -> None:
    acc, a, b, expected = CANCELLING
    a, b = (np.array([int(x, 16) for x in bits.split()], np.uint16)[None] for bits in (a, b))
    if scale < 0:
        a = a ^ np.uint16(0x8000)
    found = ops.numerics("fsum16_bf16", jnp.asarray(np.array([acc], np.uint32).view(np.float32)), a, b)
    assert np.asarray(found).view(np.uint32).tolist() == [expected]
