"""Router, routed experts and their combination (contract section 7, "MoE")."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
from numpy.typing import NDArray

from .elementary import fma, sigmoid, silu
from .formats import R, canonical, widen
from .fsum16 import gemm
from .norms import r
from .quant import gemm_w4a4, gemm_w4a16, quantise_activations
from .reduce import lanes, segments, sumsq, tree8

Expert = Callable[[NDArray, int], NDArray]
_ROWS = 64  # router rows at once, to bound memory


@np.errstate(all="ignore")
def choose(
    h: NDArray, weight: NDArray, bias: NDArray, experts_per_token: int, multiplier: float, scaling: float
) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
    """bf16 h [T, H], fp32 weight [E, H] and bias [E] -> experts int32 and weights c fp32, [T, K], keys descending."""
    rows, columns = segments(widen(h))[:, :, None], segments(weight)[:, None]
    sums = [tree8(lanes(rows[:, t : t + _ROWS], columns)) for t in range(0, len(h), _ROWS)]
    logits = np.concatenate(sums) * np.float32(multiplier)
    p = sigmoid(logits)
    key = p + bias
    ids = np.broadcast_to(np.arange(key.shape[1]), key.shape)
    order = np.lexsort((ids, -np.where(np.isnan(key), 0, key), np.isnan(key)), axis=-1)  # last key is the primary one
    chosen = order[:, :experts_per_token].astype(np.int32)
    total = np.zeros(len(h), np.float32)
    for e in np.sort(chosen, axis=1).T:
        total = total + np.take_along_axis(p, e[:, None], 1)[:, 0]
    picked = np.take_along_axis(p, chosen, 1)
    c = picked / (total + np.float32(1e-15))[:, None] * np.float32(scaling)
    return chosen, canonical(c)


@np.errstate(all="ignore")
def swiglu(gate: NDArray, up: NDArray) -> NDArray:
    """m = R(silu(G) * U), fp32 -> bf16."""
    return R(silu(gate) * up)


def bf16_expert(experts: Mapping[str, NDArray]) -> Expert:
    """f [t, M] bf16 of rows e [t, M] bf16 and one expert id, weights in bf16."""
    gate_up, down = experts["gate_up_proj"], experts["down_proj"]
    width = gate_up.shape[1] // 2

    def run(rows: NDArray, i: int) -> NDArray:
        m = swiglu(gemm(rows, gate_up[i, :width]), gemm(rows, gate_up[i, width:]))
        return R(gemm(m, down[i]))

    return run


def nvfp4_expert(experts: Mapping[str, NDArray], activation_format: str) -> Expert:
    """The same with NVFP4 weights: W4A4 if ``activation_format`` is 'nvfp4', W4A16 if 'bf16'.

    ``experts`` has gate_up_proj [E, 2I, M/2] and down_proj [E, M, I/2] (uint8), *_weight_scale (e4m3),
    gate_up_proj_weight_scale_2 [E, 2], down_proj_weight_scale_2 [E] and the input scales, 1.0 where absent. A layer
    uses the largest input scale of its experts.
    """
    if activation_format not in ("nvfp4", "bf16"):
        raise ValueError(f"activation_format is 'nvfp4' or 'bf16', not {activation_format!r}")

    def linear(x: NDArray, name: str, i: int, rows: slice, ws2: np.float32) -> NDArray:
        packed, scale = experts[name][i, rows], experts[f"{name}_weight_scale"][i, rows]
        if activation_format == "bf16":
            return gemm_w4a16(x, packed, scale, ws2)
        input_scale = np.float32(np.max(experts.get(f"{name}_input_scale", np.float32(1))))
        return gemm_w4a4(*quantise_activations(x, input_scale), input_scale, packed, scale, ws2)

    width = experts["gate_up_proj"].shape[1] // 2
    gate_up_scale, down_scale = experts["gate_up_proj_weight_scale_2"], experts["down_proj_weight_scale_2"]

    def run(rows: NDArray, i: int) -> NDArray:
        gate = linear(rows, "gate_up_proj", i, slice(0, width), gate_up_scale[i, 0])
        up = linear(rows, "gate_up_proj", i, slice(width, None), gate_up_scale[i, 1])
        return R(linear(swiglu(gate, up), "down_proj", i, slice(None), down_scale[i]))

    return run


@np.errstate(all="ignore")
def combine(e: NDArray, chosen: NDArray, c: NDArray, expert: Expert, g: NDArray, post_eps: float) -> NDArray:
    """Rows e [T, M] bf16, choices [T, K] and weights [T, K] -> R(x) [T, M] bf16, summed in ascending expert id.

    Each expert's output is scaled by ``g`` (exact in fp32), then normalised, then weighted.
    """
    x = np.zeros(e.shape, np.float32)
    for i in np.unique(chosen):  # ascending: every row meets its experts in ascending order
        t, slot = np.nonzero(chosen == i)
        z = widen(expert(e[t], int(i))) * g
        rho = r(sumsq(z), z.shape[-1], post_eps)
        x[t] = fma(c[t, slot][:, None], z * rho[:, None], x[t])
    return R(x)
