"""NVFP4 arrays as plain fp32, for gradients."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

from muse_jax.ops._call import Array, f32

_E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
_CODES = np.concatenate([_E2M1, -_E2M1])


def dequantize(codes: Array, scales: Array) -> Array:
    """Codes uint8 [..., K/2] and scales float8_e4m3fn [..., K/16] -> fp32 [..., K], without the tensor's own scale."""
    nibbles = jnp.stack([codes & 15, codes >> 4], axis=-1).reshape(*scales.shape, 16)
    values = jnp.asarray(_CODES)[nibbles.astype(jnp.int32)] * f32(scales)[..., None]
    return values.reshape(*codes.shape[:-1], 2 * codes.shape[-1])
