"""The NVFP4 quantisers (docs/numerics.md 8)."""

from __future__ import annotations

from typing import Any

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
    flatten,
    no_twin,
    scalar,
    struct,
)


def _activations(x: Array, input_scale: Array) -> list[Array]:
    rows, inner = x.shape
    return call("muse_quantize_v1", [struct((rows, inner // 2), U8), struct((rows, inner // 16), E4M3)], x, input_scale)


def _weights(w: Array) -> list[Array]:
    tensors, rows, inner = w.shape
    results = [
        struct((tensors, rows, inner // 2), U8),
        struct((tensors, rows, inner // 16), E4M3),
        struct((tensors,), F32),
    ]
    return call("muse_quantize_weight_v1", results, w)


_ACTIVATIONS = Op(_activations, no_twin, wrt=())
_WEIGHTS = Op(_weights, no_twin, wrt=())


def quantize(x: Array, input_scale: Any) -> tuple[Array, Array]:
    """Activations to NVFP4 with one static scale.

    ``x`` bf16 [..., K], K a multiple of 16; ``input_scale`` fp32 scalar -> codes uint8 [..., K/2] and scales
    float8_e4m3fn [..., K/16]. A block with a NaN or infinity gets the scale NaN. No gradient. Contract section 8.
    """
    check_dtype("quantize", "x", x, BF16)
    check_rank("quantize", "x", x, 1, "[..., K]")
    check_multiple("quantize", "the row length", x.shape[-1], 16)
    codes, scales = _ACTIVATIONS(flatten(x, 1), scalar("quantize", "input_scale", input_scale, F32))
    return codes.reshape(*x.shape[:-1], -1), scales.reshape(*x.shape[:-1], -1)


def quantize_weight(w: Array) -> tuple[Array, Array, Array]:
    """Weights to NVFP4 by ModelOpt's formula, every leading index a tensor of its own.

    ``w`` bf16 [..., N, K], K a multiple of 16 -> codes uint8 [..., N, K/2], scales float8_e4m3fn [..., N, K/16] and
    weight_scale_2 fp32 [...]. A weight that is not finite gives its tensor the
    weight_scale_2 NaN, scales of NaN (0x7F) and codes of 0, so that what uses it becomes NaN. No gradient
    (``expert_ffn_masters`` passes one straight through). Contract section 8.
    """
    check_dtype("quantize_weight", "w", w, BF16)
    check_rank("quantize_weight", "w", w, 2, "[..., N, K]")
    check_multiple("quantize_weight", "the row length", w.shape[-1], 16)
    codes, scales, scale_2 = _WEIGHTS(flatten(w, 2))
    lead, rows, inner = w.shape[:-2], w.shape[-2], w.shape[-1]
    return (
        codes.reshape(*lead, rows, inner // 2),
        scales.reshape(*lead, rows, inner // 16),
        scale_2.reshape(lead),
    )
