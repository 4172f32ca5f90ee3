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
