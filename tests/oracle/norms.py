"""RMS norms and the residual gate (contract sections 6 and 7)."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from .elementary import rsqrt, sigmoid
from .formats import R, canonical, widen
from .reduce import sumsq, sumsq64


@np.errstate(all="ignore")
def r(ss: NDArray, n: int, eps: ArrayLike) -> NDArray[np.float32]:
    """rsqrt(ss / n + eps) in fp32."""
    return rsqrt(ss / np.float32(n) + np.float32(eps))


def gain(w: NDArray) -> NDArray[np.float32]:
    """The gain R(1 + w) of a zero-centred weight, widened."""
    return widen(R(np.float32(1) + widen(w)))


@np.errstate(all="ignore")
def plain_norm(x: NDArray, eps: ArrayLike) -> NDArray:
    """Without weight: R(x * r), [..., n] fp32 or bf16 -> bf16."""
    x = widen(x)
    return R(x * r(sumsq(x), x.shape[-1], eps)[..., None])


@np.errstate(all="ignore")
def gained_norm(x: NDArray, g: NDArray, eps: ArrayLike) -> NDArray:
    """R((x * r) * g) with the fp32 gain ``g`` [n] (``gain(w)``, or the final norm's weight as it is) -> bf16."""
    x = widen(x)
    return R((x * r(sumsq(x), x.shape[-1], eps)[..., None]) * g)


@np.errstate(all="ignore")
def scale_first_norm(y: NDArray, g: NDArray, eps: ArrayLike) -> NDArray:
    """z = R(y * g), then R(z * r(sumsq(z))) -> bf16."""
    return plain_norm(R(widen(y) * g), eps)


@np.errstate(all="ignore")
def head_norm(x: NDArray, eps: ArrayLike) -> NDArray[np.float32]:
    """x * r(sumsq64(x), 64, eps) over the last axis (64), not yet rounded: fp32."""
    x = widen(x)
    return x * r(sumsq64(x), 64, eps)[..., None]


@np.errstate(all="ignore")
def residual_gate(s: NDArray, n: NDArray, gate: NDArray, temperature: float) -> NDArray[np.float32]:
    """alpha * s + beta * n per channel: fp32 stream [T, H], bf16 branch [T, H], gate weight [H] -> fp32 [T, H]."""
    z = widen(gate) / np.float32(temperature)
    beta = sigmoid(z)
    alpha = np.sqrt(np.maximum(sigmoid(-z) * (np.float32(1) + beta), np.float32(1e-3)))
    return canonical(alpha * s + beta * widen(n))
