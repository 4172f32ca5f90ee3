"""What ops and their handlers say about wrong operands."""

from __future__ import annotations

import re
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from muse_jax import ops


def bf16(*shape: int) -> jax.Array:
    return jnp.zeros(shape, jnp.bfloat16)


def f32(*shape: int) -> jax.Array:
    return jnp.zeros(shape, jnp.float32)


def i32(*shape: int) -> jax.Array:
    return jnp.zeros(shape, jnp.int32)


def u8(*shape: int) -> jax.Array:
    return jnp.zeros(shape, jnp.uint8)


def e4m3(*shape: int) -> jax.Array:
    return jnp.zeros(shape, jnp.float8_e4m3fn)


X, W, GAIN = bf16(8, 128), bf16(128, 128), bf16(128)
CHOSEN, W13, W2, F = i32(8, 3), bf16(8, 256, 128), bf16(8, 128, 128), bf16(8, 3, 128)


def route_with(**changes: object) -> object:
    operands = {"h": bf16(2, 128), "w": f32(8, 128), "bias": f32(8), "experts_per_token": 2} | changes
    return ops.router(**operands, multiplier=1.0, scaling=1.0)  # type: ignore[arg-type]


def nvfp4_with(**changes: object) -> object:
    operands = {
        "x": bf16(2, 128),
        "experts": i32(2, 3),
        "first": 0,
        "w13": u8(4, 512, 64),
        "w13_scale": e4m3(4, 512, 8),
        "w13_scale_2": f32(4, 2),
        "w2": u8(4, 128, 128),
        "w2_scale": e4m3(4, 128, 16),
        "w2_scale_2": f32(4),
        "input_scales": f32(2),
    } | changes
    return ops.expert_ffn_nvfp4(**operands, quantize_activations=True)  # type: ignore[arg-type]


def attend_with(**changes: object) -> object:
    operands = {"q": bf16(3, 4, 64), "k": bf16(5, 2, 64), "v": bf16(5, 2, 64), "position": i32(3)} | changes
    return ops.attention(**operands, scale=1.0)  # type: ignore[arg-type]


ERRORS: list[tuple[Callable, type[Exception], str]] = [
    (lambda: ops.gemm(f32(2, 128), W), TypeError, "gemm: x has dtype float32, expected bfloat16; cast it first"),
    (lambda: ops.gemm(3.0, W), TypeError, "gemm: x is a float, expected an array of bfloat16"),
    (lambda: ops.gemm(bf16(), W), ValueError, "gemm: x has shape [], expected [..., K]"),
    (
        lambda: ops.gemm(bf16(2, 100), W),
        ValueError,
        "gemm: K (the reduced dimension) is 100, expected a positive multiple",
    ),
    (lambda: ops.gemm(bf16(2, 256), W), ValueError, "gemm: w has shape [128, 128], expected [N, 256]; w is [out"),
    (
        lambda: ops.gemm(X, W, out_dtype=jnp.float16),
        TypeError,
        "gemm: out_dtype is float16, expected bfloat16 or float32",
    ),
    (
        lambda: ops.gemm_w4a16(X, u8(4, 63), e4m3(4, 8), 1.0),
        ValueError,
        "codes has shape [4, 63], expected [N, 64]; two",
    ),
    (
        lambda: ops.gemm_w4a16(X, u8(4, 64), e4m3(4, 4), 1.0),
        ValueError,
        "scales has shape [4, 4], expected [4, 8]; one",
    ),
    (
        lambda: ops.gemm_w4a16(X, u8(4, 64), f32(4, 8), 1.0),
        TypeError,
        "scales has dtype float32, expected float8_e4m3fn",
    ),
    (
        lambda: ops.gemm_w4a16(X, u8(4, 64), e4m3(4, 8), f32(2)),
        ValueError,
        "gemm_w4a16: scale has shape [2], expected []",
    ),
    (
        lambda: ops.gemm_w4a4(u8(2, 64), e4m3(2, 4), u8(4, 64), e4m3(4, 8), 1.0, 1.0),
        ValueError,
        "gemm_w4a4: x_scales has shape [2, 4], expected [2, 8]; one scale per 16 elements of x",
    ),
    (lambda: ops.rms_norm(bf16(2, 64), eps=1e-5), ValueError, "rms_norm: the row length is 64, expected a positive"),
    (
        lambda: ops.rms_norm(X, bf16(64), eps=1e-5),
        ValueError,
        "rms_norm: gain has shape [64], expected [128]; one gain",
    ),
    (lambda: ops.rms_norm(i32(2, 128), eps=1.0), TypeError, "x has dtype int32, expected bfloat16 or float32"),
    (lambda: ops.rms_norm(X, eps=1.0, scale_first=True), ValueError, "scale_first needs a bfloat16 x and a gain"),
    (
        lambda: ops.q_norm_rope(bf16(3, 2, 32), eps=1.0),
        ValueError,
        "q_norm_rope: x has shape [3, 2, 32], expected [3, 2, 64]",
    ),
    (
        lambda: ops.q_norm_rope(bf16(3, 2, 64), f32(2, 64), eps=1.0),
        ValueError,
        "table has shape [2, 64], expected [3, 64]",
    ),
    (
        lambda: ops.kv_norm_rope(bf16(3, 2, 64), bf16(3, 1, 64), eps=1.0),
        ValueError,
        "kv_norm_rope: v has shape [3, 1, 64]",
    ),
    (lambda: ops.rope_table(4, 0.0), ValueError, "rope_table: theta is 0.0, expected a positive number"),
    (lambda: ops.rope_table(2**20 + 1, 1e4), ValueError, "rope_table: 1048577 positions, expected 0 to 1048576"),
    (
        lambda: attend_with(k=bf16(5, 3, 64), v=bf16(5, 3, 64)),
        ValueError,
        "q has 4 heads, expected a multiple of k's 3",
    ),
    (lambda: attend_with(v=bf16(4, 2, 64)), ValueError, "attention: v has shape [4, 2, 64], expected [5, 2, 64]"),
    (
        lambda: attend_with(position=i32(5)),
        ValueError,
        "attention: position has shape [5], expected [3]; one position per row",
    ),
    (lambda: attend_with(position=f32(3)), TypeError, "attention: position has dtype float32, expected int32"),
    (lambda: attend_with(window=0), ValueError, "attention: window is 0, expected a positive length, or None"),
    (lambda: attend_with(q=bf16(4, 64)), ValueError, "attention: q has shape [4, 64], expected [..., rows, heads, 64]"),
    (
        lambda: ops.attention_gate(bf16(3, 2, 64), bf16(3, 64), eps=1.0),
        ValueError,
        "u has shape [3, 64], expected [3, 128]",
    ),
    (lambda: ops.gate_coefficients(bf16(2, 2), temperature=1.0), ValueError, "gate has shape [2, 2], expected [H]"),
    (
        lambda: ops.residual(f32(2, 4), bf16(2, 5), f32(4), f32(4)),
        ValueError,
        "residual: n has shape [2, 5], expected [2, 4]",
    ),
    (
        lambda: ops.residual(f32(2, 4), bf16(2, 4), f32(4), f32(5)),
        ValueError,
        "residual: beta has shape [5], expected [4]",
    ),
    (
        lambda: route_with(w=f32(8, 256)),
        ValueError,
        "router: w has shape [8, 256], expected [E, 128]; one row per expert",
    ),
    (lambda: route_with(bias=f32(9)), ValueError, "router: bias has shape [9], expected [8]"),
    (lambda: route_with(experts_per_token=9), ValueError, "router: experts_per_token is 9, expected 1 to 8"),
    (
        lambda: ops.quantize(bf16(2, 24), 1.0),
        ValueError,
        "quantize: the row length is 24, expected a positive multiple of 16",
    ),
    (lambda: ops.quantize_weight(bf16(32)), ValueError, "quantize_weight: w has shape [32], expected [..., N, K]"),
    (
        lambda: ops.expert_ffn(X, i32(7, 3), 0, W13, W2),
        ValueError,
        "expert_ffn: experts has shape [7, 3], expected [8, K]",
    ),
    (
        lambda: ops.expert_ffn(X, CHOSEN, 0, W13, bf16(8, 128, 256)),
        ValueError,
        "w2 has shape [8, 128, 256], expected [8, 128, 1",
    ),
    (
        lambda: ops.expert_ffn(X, CHOSEN, 0, bf16(8, 255, 128), W2),
        ValueError,
        "w13 has 255 rows per expert, expected gate",
    ),
    (
        lambda: ops.expert_ffn(X, CHOSEN, f32(), W13, W2),
        TypeError,
        "expert_ffn: first has dtype float32, expected int32",
    ),
    (
        lambda: nvfp4_with(w13_scale=e4m3(4, 512, 4)),
        ValueError,
        "w13_scale has shape [4, 512, 4], expected [4, 512, 8]",
    ),
    (
        lambda: nvfp4_with(w2=u8(4, 128, 64)),
        ValueError,
        "expert_ffn_nvfp4: w2 has shape [4, 128, 64], expected [4, 128, 128]",
    ),
    (lambda: nvfp4_with(w13_scale_2=f32(4)), ValueError, "w13_scale_2 has shape [4], expected [4, 2]"),
    (lambda: nvfp4_with(input_scales=f32(3)), ValueError, "input_scales has shape [3], expected [2]; one scale for x"),
    (
        lambda: ops.combine(F, f32(8, 2), CHOSEN, GAIN, eps=1.0),
        ValueError,
        "combine: weights has shape [8, 2], expected [8, 3]",
    ),
    (
        lambda: ops.combine(bf16(1, 65, 128), f32(1, 65), i32(1, 65), GAIN, eps=1.0),
        ValueError,
        "f has 65 experts per token",
    ),
    (
        lambda: ops.head(X, bf16(9, 64), multiplier=1.0, cap=1.0),
        ValueError,
        "head: w has shape [9, 64], expected [V, 128]",
    ),
    (
        lambda: ops.log_prob(f32(2, 12), i32(2)),
        ValueError,
        "log_prob: the vocabulary is 12, expected a positive multiple of 8",
    ),
    (
        lambda: ops.log_prob(f32(2, 16), i32(3)),
        ValueError,
        "log_prob: token has shape [3], expected [2]; one token per row",
    ),
    (
        lambda: ops.numerics("cos", f32(2)),
        ValueError,
        "numerics: 'cos' is none of the contract's functions, expected exp, ",
    ),
    (lambda: ops.numerics("fma", f32(2)), ValueError, "numerics: fma takes 3 operands, got 1"),
    (lambda: ops.numerics("exp", bf16(2)), TypeError, "numerics exp: operand 0 has dtype bfloat16, expected float32"),
]


@pytest.mark.parametrize(("make", "kind", "message"), ERRORS, ids=[message[:40] for _, _, message in ERRORS])
def test_error_says_what_was_given_and_what_is_allowed(make: Callable, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=re.escape(message)):
        make()


HANDLER_ERRORS = [
    ("muse_gemm_v1", f32(2, 4), (bf16(2, 100), bf16(4, 100)), {}, "gemm: K (the reduced dimension) is 100"),
    ("muse_gemm_v1", f32(2, 4), (bf16(2, 128), bf16(5, 128)), {}, "gemm: w has shape [5, 128], expected [4, 128]"),
    (
        "muse_residual_v1",
        f32(2, 4),
        (f32(2, 4), bf16(2, 4), f32(5), f32(4)),
        {},
        "residual: alpha has shape [5], expected [4]",
    ),
    ("muse_numerics_v1", f32(4), (f32(4),), {"function": np.int64(99)}, "numerics: function is 99"),
    ("muse_numerics_v1", f32(4), (f32(5),), {"function": np.int64(0)}, "numerics: operand 0 has the wrong size"),
    ("muse_log_prob_v1", f32(2), (f32(2, 12), i32(2)), {}, "log_prob: the vocabulary is 12"),
]


@pytest.mark.parametrize(("target", "result", "operands", "attributes", "message"), HANDLER_ERRORS)
def test_handlers_check_for_themselves(
    target: str, result: jax.Array, operands: tuple, attributes: dict, message: str
) -> None:
    with pytest.raises(Exception, match=re.escape(message)):
        jax.block_until_ready(
            jax.ffi.ffi_call(target, jax.ShapeDtypeStruct(result.shape, result.dtype))(*operands, **attributes)
        )
