"""Routed experts (docs/numerics.md 7, MoE 4)."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from muse_jax.ops._call import (
    BF16,
    E4M3,
    F32,
    I32,
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
    scalar,
    struct,
)
from muse_jax.ops._nvfp4 import dequantize
from muse_jax.ops.quantize import quantize_weight

_BLOCKS_PER_EXPERT = 4


def _ffn_twin(x: Array, experts: Array, first: Array, w13: Array, w2: Array) -> Array:
    """All pairs, sorted by expert, in blocks of rows of one expert each.

    A block is a quarter of an expert's mean share, so that five blocks for every expert always suffice, whatever each
    of them was given: the products' cost does not grow with the number of experts, and shapes are static.
    """
    (tokens, slots), (local, _, intermediate) = experts.shape, w2.shape
    pairs = tokens * slots
    rows = max(8, -(-pairs // (_BLOCKS_PER_EXPERT * local)))
    expert = experts.reshape(-1) - first
    expert = jnp.where((expert >= 0) & (expert < local), expert, local)  # pairs of other devices come last
    order = jnp.argsort(expert, stable=True)
    sizes = jnp.zeros((local + 1,), jnp.int32).at[expert].add(1)[:local]
    counts = -(-sizes // rows)
    ends = jnp.cumsum(counts)
    block = jnp.arange(pairs // rows + local)
    owner = jnp.minimum((ends <= block[:, None]).sum(axis=1), local - 1)
    inside = (block - (ends - counts)[owner])[:, None] * rows + jnp.arange(rows)  # place among the expert's pairs
    given = (block < ends[-1])[:, None] & (inside < sizes[owner][:, None])
    place = jnp.minimum((jnp.cumsum(sizes) - sizes)[owner][:, None] + inside, pairs - 1)
    # Empty places get indices of their own beyond the pairs: all differ, so that moving rows back is no addition.
    pair = jnp.where(given, order[place], pairs + jnp.arange(given.size).reshape(given.shape))

    at = jnp.repeat(f32(x), slots, axis=0).at[pair]
    z = at.get(mode="fill", fill_value=0, unique_indices=True)
    gate_up = einsum("bim,bnm->bin", z, f32(w13)[owner])
    m = jax.nn.silu(gate_up[..., :intermediate]) * gate_up[..., intermediate:]
    f = einsum("bin,bmn->bim", m, f32(w2)[owner])
    f = jnp.zeros((pairs, x.shape[1]), jnp.float32).at[pair].set(f, mode="drop", unique_indices=True)
    return f.reshape(tokens, slots, -1).astype(jnp.bfloat16)


def _bf16(x: Array, experts: Array, first: Array, w13: Array, w2: Array) -> Array:
    return call("muse_expert_ffn_v1", struct((*experts.shape, x.shape[1]), BF16), x, experts, first, w13, w2)


def _nvfp4(x: Array, experts: Array, first: Array, *weights: Array, quantize_activations: bool) -> Array:
    return call(
        "muse_expert_ffn_nvfp4_v1",
        struct((*experts.shape, x.shape[1]), BF16),
        x,
        experts,
        first,
        *weights,
        quantize_activations=np.bool_(quantize_activations),
    )


def _dequantized(
    w13: Array, w13_scale: Array, w13_scale_2: Array, w2: Array, w2_scale: Array, w2_scale_2: Array
) -> tuple[Array, Array]:
    gate_up = dequantize(w13, w13_scale)
    gate_up = gate_up.reshape(gate_up.shape[0], 2, -1, gate_up.shape[2]) * w13_scale_2[:, :, None, None]
    down = dequantize(w2, w2_scale) * w2_scale_2[:, None, None]
    return gate_up.reshape(w13.shape[0], w13.shape[1], -1), down


def _nvfp4_twin(x: Array, experts: Array, first: Array, *weights: Array, quantize_activations: bool) -> Array:
    del quantize_activations
    return _ffn_twin(x, experts, first, *_dequantized(*weights[:6]))


def _quantized_masters(w13: Array, w2: Array) -> tuple[Array, ...]:
    local, rows, model = w13.shape
    codes, scales, scale_2 = quantize_weight(w13.reshape(local, 2, rows // 2, model))
    return codes.reshape(local, rows, -1), scales.reshape(local, rows, -1), scale_2, *quantize_weight(w2)


def _masters(
    x: Array, experts: Array, first: Array, w13: Array, w2: Array, input_scales: Array, *, quantize_activations: bool
) -> Array:
    weights = _quantized_masters(w13, w2)
    return _nvfp4(x, experts, first, *weights, input_scales, quantize_activations=quantize_activations)


def _masters_twin(
    x: Array, experts: Array, first: Array, w13: Array, w2: Array, input_scales: Array, *, quantize_activations: bool
) -> Array:
    del input_scales, quantize_activations
    # Straight through: the product sees the quantised weights, their gradient goes to the masters unchanged.
    stopped = _dequantized(*_quantized_masters(jax.lax.stop_gradient(w13), jax.lax.stop_gradient(w2)))
    seen = [f32(w) + jax.lax.stop_gradient(q - f32(w)) for w, q in zip((w13, w2), stopped, strict=True)]
    return _ffn_twin(x, experts, first, *seen)


_BF16_OP = Op(_bf16, _ffn_twin, wrt=(0, 3, 4))
_NVFP4_OP = Op(_nvfp4, _nvfp4_twin, wrt=(0,))
_MASTERS_OP = Op(_masters, _masters_twin, wrt=(0, 3, 4))


def expert_ffn(x: Array, experts: Array, first: Any, w13: Array, w2: Array) -> Array:
    """``down(silu(gate x) * up x)`` of every (token, slot) whose expert is one of the given ones.

    ``x`` bf16 [..., M], ``experts`` int32 [..., K] (ids of the whole layer), ``first`` int32 scalar: the id of the
    first given expert; ``w13`` bf16 [El, 2I, M] (gate rows first), ``w2`` bf16 [El, M, I]; M and I multiples of 128 ->
    bf16 [..., K, M], zero where the expert is elsewhere. Gradients flow to x, w13 and w2. Contract section 7, MoE 4.
    """
    op = "expert_ffn"
    operands = _check_rows(op, x, experts, first)
    local, intermediate = _check_bf16(op, x, w13, w2)
    del local, intermediate
    return _BF16_OP(*operands, w13, w2).reshape(*experts.shape, x.shape[-1])


def expert_ffn_nvfp4(
    x: Array,
    experts: Array,
    first: Any,
    w13: Array,
    w13_scale: Array,
    w13_scale_2: Array,
    w2: Array,
    w2_scale: Array,
    w2_scale_2: Array,
    input_scales: Array,
    *,
    quantize_activations: bool,
) -> Array:
    """``expert_ffn`` with NVFP4 weights.

    ``w13`` uint8 [El, 2I, M/2], ``w13_scale`` float8_e4m3fn [El, 2I, M/16], ``w13_scale_2`` fp32 [El, 2] (gate, up);
    ``w2`` uint8 [El, M, I/2], ``w2_scale`` [El, M, I/16], ``w2_scale_2`` fp32 [El]; ``input_scales`` fp32 [2] (of x and
    of the activation), used when ``quantize_activations`` (W4A4; otherwise W4A16). The rest as in ``expert_ffn``. The
    gradient flows to ``x`` only, straight through the quantisers. Contract sections 5, 7 (MoE 4) and 8.
    """
    op = "expert_ffn_nvfp4"
    operands = _check_rows(op, x, experts, first)
    model = x.shape[-1]
    for name, codes, scale in (("w13", w13, w13_scale), ("w2", w2, w2_scale)):
        check_dtype(op, name, codes, U8)
        check_dtype(op, f"{name}_scale", scale, E4M3)
    check_shape(op, "w13", w13, "El", "2I", model // 2, hint="two codes per byte along M")
    local, intermediate = w13.shape[0], _intermediate(op, w13)
    check_shape(op, "w13_scale", w13_scale, local, 2 * intermediate, model // 16, hint="one scale per 16 elements")
    check_shape(op, "w2", w2, local, model, intermediate // 2, hint="two codes per byte along I")
    check_shape(op, "w2_scale", w2_scale, local, model, intermediate // 16, hint="one scale per 16 elements")
    for name, x_, shape in (("w13_scale_2", w13_scale_2, (local, 2)), ("w2_scale_2", w2_scale_2, (local,))):
        check_dtype(op, name, x_, F32)
        check_shape(op, name, x_, *shape)
    _check_input_scales(op, input_scales)
    weights = (w13, w13_scale, w13_scale_2, w2, w2_scale, w2_scale_2, input_scales)
    f = _NVFP4_OP(*operands, *weights, quantize_activations=bool(quantize_activations))
    return f.reshape(*experts.shape, model)


def expert_ffn_masters(
    x: Array, experts: Array, first: Any, w13: Array, w2: Array, input_scales: Array, *, quantize_activations: bool
) -> Array:
    """``expert_ffn_nvfp4`` on bf16 masters, quantised here (gate and up halves as separate tensors).

    Operands as in ``expert_ffn`` and ``input_scales`` as in ``expert_ffn_nvfp4``. Gradients flow to ``x`` and straight
    through the quantisation to ``w13`` and ``w2``. A master that is not finite makes its expert's results NaN.
    Contract sections 5, 7 (MoE 4) and 8.
    """
    op = "expert_ffn_masters"
    operands = _check_rows(op, x, experts, first)
    _check_bf16(op, x, w13, w2)
    _check_input_scales(op, input_scales)
    f = _MASTERS_OP(*operands, w13, w2, input_scales, quantize_activations=bool(quantize_activations))
    return f.reshape(*experts.shape, x.shape[-1])


def _check_rows(op: str, x: Array, experts: Array, first: Any) -> tuple[Array, Array, Array]:
    check_dtype(op, "x", x, BF16)
    check_rank(op, "x", x, 1, "[..., M]")
    check_multiple(op, "the MoE hidden size", x.shape[-1], 128)
    check_dtype(op, "experts", experts, I32)
    check_shape(op, "experts", experts, *x.shape[:-1], "K", hint="one row of expert ids per row of x")
    return flatten(x, 1), flatten(experts, 1), scalar(op, "first", first, I32)


def _intermediate(op: str, w13: Array) -> int:
    if w13.shape[1] % 2:
        raise ValueError(f"{op}: w13 has {w13.shape[1]} rows per expert, expected gate rows and as many up rows")
    check_multiple(op, "the MoE intermediate size", w13.shape[1] // 2, 128)
    return w13.shape[1] // 2


def _check_bf16(op: str, x: Array, w13: Array, w2: Array) -> tuple[int, int]:
    check_dtype(op, "w13", w13, BF16)
    check_dtype(op, "w2", w2, BF16)
    check_shape(op, "w13", w13, "El", "2I", x.shape[-1], hint="its last dimension is that of x")
    local, intermediate = w13.shape[0], _intermediate(op, w13)
    check_shape(op, "w2", w2, local, x.shape[-1], intermediate, hint="w2 is [El, M, I] for w13 [El, 2I, M]")
    return local, intermediate


def _check_input_scales(op: str, input_scales: Array) -> None:
    check_dtype(op, "input_scales", input_scales, F32)
    check_shape(op, "input_scales", input_scales, 2, hint="one scale for x and one for the activation")
