"""Building blocks of the model: linear maps, norms and the residual gate.

All modules here and beside it are one device's share, to be called inside a `jax.shard_map` over the mesh axis "rank".
They are made with zeros of the parameters' shapes; `muse_jax.model.build` attaches real arrays without that memory.
"""

import jax
import jax.numpy as jnp
from flax import nnx

from muse_jax import ops

Taps = dict[str, jax.Array]
"""Intermediate arrays of one device's share by name (docs/architecture.md)."""


class Buffer(nnx.Variable):
    """A parameter that is not trained: expert codes and scales, the router's bias."""


def record(taps: Taps | None, name: str, value: jax.Array) -> None:
    """Keep a tap where taps are wanted."""
    if taps is not None:
        taps[name] = value


class Linear(nnx.Module):
    """`R(gemm(x, weight))`: bf16 [..., inputs] -> bf16 [..., outputs]; weight bf16 [outputs, inputs]."""

    def __init__(self, inputs: int, outputs: int):
        """A map of zeros."""
        self.weight = nnx.Param(jnp.zeros((outputs, inputs), jnp.bfloat16))

    def __call__(self, x: jax.Array) -> jax.Array:
        """Rows -> rows."""
        return ops.gemm(x, self.weight[...])


class RMSNorm(nnx.Module):
    """The contract's norms with a weight (docs/numerics.md section 6): fp32 or bf16 [..., size] -> bf16.

    The weight, bf16 [size], is zero-centred unless `centred` is False. `scale_first` applies it before normalising;
    `round_input` rounds an fp32 input to bf16 before anything else.
    """

    def __init__(
        self, size: int, eps: float, *, scale_first: bool = False, round_input: bool = False, centred: bool = True
    ):
        """A norm with a weight of zero."""
        self.weight = nnx.Param(jnp.zeros((size,), jnp.bfloat16))
        self.eps = eps
        self.scale_first = scale_first
        self.round_input = round_input
        self.centred = centred

    def __call__(self, x: jax.Array) -> jax.Array:
        """Rows -> normalised rows."""
        return ops.rms_norm(
            x,
            self.weight[...],
            eps=self.eps,
            scale_first=self.scale_first,
            round_input=self.round_input,
            centred=self.centred,
        )


class ResidualGate(nnx.Module):
    """`s = alpha * s + beta * n`, per channel: s fp32 [..., H], n bf16 [..., H] -> fp32; gate bf16 [H]."""

    def __init__(self, size: int, temperature: float):
        """A gate with a weight of zero."""
        self.gate = nnx.Param(jnp.zeros((size,), jnp.bfloat16))
        self.temperature = temperature

    def __call__(self, s: jax.Array, n: jax.Array) -> jax.Array:
        """Stream and branch -> stream."""
        alpha, beta = ops.gate_coefficients(self.gate[...], temperature=self.temperature)
        return ops.residual(s, n, alpha, beta)
