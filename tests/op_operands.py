"""Operands of one size that the ops' tests of transformations and of gradients share."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from op_helpers import normal

RNG = np.random.default_rng(20)
W = jnp.asarray(normal(RNG, 128, 128, scale=0.1))
GAIN = jnp.asarray(normal(RNG, 128, scale=0.1))
X = jnp.asarray(normal(RNG, 8, 128))
CHOSEN = jnp.asarray(np.argsort(RNG.random((8, 8)), axis=1)[:, :3].astype(np.int32))
W13 = jnp.asarray(normal(RNG, 8, 256, 128, scale=0.1))
W2 = jnp.asarray(normal(RNG, 8, 128, 128, scale=0.1))
