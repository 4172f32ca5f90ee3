"""The residual gate (docs/numerics.md 7, Residual gate)."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from muse_jax.ops._call import BF16, F32, Array, Op, call, check_dtype, check_rank, check_shape, f32, flatten, struct


def _coefficients(gate: Array, *, temperature: np.float32) -> list[Array]:
    results = [struct(gate.shape, F32)] * 2
    return call("muse_gate_coefficients_v1", results, gate, temperature=temperature)


def _coefficients_twin(gate: Array, *, temperature: np.float32) -> list[Array]:
    z = f32(gate) / temperature
    beta = jax.nn.sigmoid(z)
    return [jnp.sqrt(jnp.maximum(jax.nn.sigmoid(-z) * (1 + beta), 1e-3)), beta]


def _residual(s: Array, n: Array, alpha: Array, beta: Array) -> Array:
    return call("muse_residual_v1", struct(s.shape, F32), s, n, alpha, beta)


def _residual_twin(s: Array, n: Array, alpha: Array, beta: Array) -> Array:
    return alpha * s + beta * f32(n)


_COEFFICIENTS = Op(_coefficients, _coefficients_twin, wrt=(0,))
_RESIDUAL = Op(_residual, _residual_twin, wrt=(0, 1, 2, 3))


def gate_coefficients(gate: Array, *, temperature: float) -> tuple[Array, Array]:
    """``alpha`` and ``beta``, fp32 [H], of a residual gate's weight, bf16 [H].

    The gradient flows to ``gate``. Contract section 7, Residual gate.
    """
    check_dtype("gate_coefficients", "gate", gate, BF16)
    check_shape("gate_coefficients", "gate", gate, "H")
    alpha, beta = _COEFFICIENTS(gate, temperature=np.float32(temperature))
    return alpha, beta


def residual(s: Array, n: Array, alpha: Array, beta: Array) -> Array:
    """``alpha * s + beta * n``: the stream after a branch.

    ``s`` fp32 [..., H], ``n`` bf16 [..., H], ``alpha`` and ``beta`` fp32 [H] from ``gate_coefficients`` -> fp32 like
    ``s``. Gradients flow to all four. Contract section 7, Residual gate.
    """
    op = "residual"
    check_dtype(op, "s", s, F32)
    check_rank(op, "s", s, 1, "[..., H]")
    check_dtype(op, "n", n, BF16)
    check_shape(op, "n", n, *s.shape, hint="n has the shape of s")
    for name, x in (("alpha", alpha), ("beta", beta)):
        check_dtype(op, name, x, F32)
        check_shape(op, name, x, s.shape[-1], hint="one coefficient per channel")
    return _RESIDUAL(flatten(s, 1), flatten(n, 1), alpha, beta).reshape(s.shape)
