"""The canonical GEMM (docs/numerics.md 5)."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np

from muse_jax.ops._call import (
    BF16,
    E4M3,
    F32,
    U8,
    Array,
    Op,
    call,
    check_dtype,
    check_multiple,
    check_rank,
    check_shape,
    einsum,
    f32,
    flatten,
    no_twin,
    scalar,
    struct,
)
from muse_jax.ops._nvfp4 import dequantize


def _gemm(x: Array, w: Array, *, out: np.dtype) -> Array:
    return call("muse_gemm_v1", struct((x.shape[0], w.shape[0]), out), x, w)


def _gemm_twin(x: Array, w: Array, *, out: np.dtype) -> Array:
    return einsum("tk,nk->tn", f32(x), f32(w)).astype(out)


def _w4a16(x: Array, codes: Array, scales: Array, scale: Array, *, out: np.dtype) -> Array:
    return call("muse_gemm_w4a16_v1", struct((x.shape[0], codes.shape[0]), out), x, codes, scales, scale)


def _w4a16_twin(x: Array, codes: Array, scales: Array, scale: Array, *, out: np.dtype) -> Array:
    return (einsum("tk,nk->tn", f32(x), dequantize(codes, scales)) * scale).astype(out)


def _w4a4(
    x_codes: Array, x_scales: Array, codes: Array, scales: Array, ws2: Array, input_scale: Array, *, out: np.dtype
) -> Array:
    result = struct((x_codes.shape[0], codes.shape[0]), out)
    return call("muse_gemm_w4a4_v1", result, x_codes, x_scales, codes, scales, ws2, input_scale)


_GEMM = Op(_gemm, _gemm_twin, wrt=(0, 1))
_W4A16 = Op(_w4a16, _w4a16_twin, wrt=(0,))
_W4A4 = Op(_w4a4, no_twin, wrt=())


def gemm(x: Array, w: Array, *, out_dtype: Any = jnp.bfloat16) -> Array:
    """``x @ w.T`` in the contract's order.

    ``x`` bf16 [..., K], ``w`` bf16 [N, K], K a multiple of 128 -> [..., N] as ``out_dtype``: bfloat16 (rounded once) or
    float32. Gradients flow to ``x`` and ``w``. Other dtypes raise TypeError, shapes that do not fit ValueError.
    Contract section 5.
    """
    out = _out("gemm", out_dtype)
    check_dtype("gemm", "x", x, BF16)
    check_dtype("gemm", "w", w, BF16)
    inner = _inner("gemm", x)
    check_shape("gemm", "w", w, "N", inner, hint="w is [out features, in features] and must have x's last dimension")
    return _GEMM(flatten(x, 1), w, out=out).reshape(*x.shape[:-1], w.shape[0])


def gemm_w4a16(x: Array, codes: Array, scales: Array, scale: Any, *, out_dtype: Any = jnp.bfloat16) -> Array:
    """``x @ w.T * scale`` for NVFP4 weights and bf16 activations.

    ``x`` bf16 [..., K], ``codes`` uint8 [N, K/2], ``scales`` float8_e4m3fn [N, K/16], ``scale`` fp32 scalar (the
    tensor's weight_scale_2) -> [..., N] as ``out_dtype``. The gradient flows to ``x`` only. Contract section 5, W4A16.
    """
    op, out = "gemm_w4a16", _out("gemm_w4a16", out_dtype)
    check_dtype(op, "x", x, BF16)
    inner = _inner(op, x)
    _check_codes(op, "codes", "scales", codes, scales, "N", inner)
    y = _W4A16(flatten(x, 1), codes, scales, scalar(op, "scale", scale, F32), out=out)
    return y.reshape(*x.shape[:-1], codes.shape[0])


def gemm_w4a4(
    x_codes: Array,
    x_scales: Array,
    codes: Array,
    scales: Array,
    weight_scale_2: Any,
    input_scale: Any,
    *,
    out_dtype: Any = jnp.bfloat16,
) -> Array:
    """``x @ w.T`` with both operands NVFP4, ``x`` as ``quantize`` makes it.

    ``x_codes`` uint8 [..., K/2], ``x_scales`` float8_e4m3fn [..., K/16], ``codes`` [N, K/2], ``scales`` [N, K/16], two
    fp32 scalars -> [..., N] as ``out_dtype``. No gradients. Contract section 5, W4A4.
    """
    op, out = "gemm_w4a4", _out("gemm_w4a4", out_dtype)
    check_dtype(op, "x_codes", x_codes, U8)
    check_rank(op, "x_codes", x_codes, 1, "[..., K/2]")
    lead, inner = x_codes.shape[:-1], 2 * x_codes.shape[-1]
    check_multiple(op, "K (the reduced dimension)", inner, 128)
    check_dtype(op, "x_scales", x_scales, E4M3)
    check_shape(op, "x_scales", x_scales, *lead, inner // 16, hint="one scale per 16 elements of x")
    _check_codes(op, "codes", "scales", codes, scales, "N", inner)
    ws2, input_scale = scalar(op, "weight_scale_2", weight_scale_2, F32), scalar(op, "input_scale", input_scale, F32)
    y = _W4A4(flatten(x_codes, 1), flatten(x_scales, 1), codes, scales, ws2, input_scale, out=out)
    return y.reshape(*lead, codes.shape[0])


def _out(op: str, dtype: Any) -> np.dtype:
    out = np.dtype(dtype)
    if out not in (BF16, F32):
        raise TypeError(f"{op}: out_dtype is {out}, expected bfloat16 or float32")
    return out


def _inner(op: str, x: Array) -> int:
    check_rank(op, "x", x, 1, "[..., K]")
    check_multiple(op, "K (the reduced dimension)", x.shape[-1], 128)
    return x.shape[-1]


def _check_codes(op: str, codes_name: str, scales_name: str, codes: Array, scales: Array, n: int | str, inner: int):
    check_dtype(op, codes_name, codes, U8)
    check_dtype(op, scales_name, scales, E4M3)
    check_shape(op, codes_name, codes, n, inner // 2, hint="two codes per byte along the reduced dimension")
    check_shape(op, scales_name, scales, codes.shape[0], inner // 16, hint="one scale per 16 elements")
