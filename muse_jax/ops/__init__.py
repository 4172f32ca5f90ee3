"""JAX faces of the op-by-op custom calls.

Every op checks its operands and makes one custom call, whose bits docs/numerics.md fixes on every platform. All work
under jit, scan, while_loop, vmap (sequentially), grad and shard_map.
"""

from muse_jax.ops.attention import attention, attention_gate
from muse_jax.ops.combine import combine
from muse_jax.ops.experts import expert_ffn, expert_ffn_masters, expert_ffn_nvfp4
from muse_jax.ops.gemm import gemm, gemm_w4a4, gemm_w4a16
from muse_jax.ops.head import head, log_prob
from muse_jax.ops.numerics import numerics
from muse_jax.ops.quantize import quantize, quantize_weight
from muse_jax.ops.residual import gate_coefficients, residual
from muse_jax.ops.rms_norm import rms_norm
from muse_jax.ops.rope import kv_norm_rope, q_norm_rope, rope_table
from muse_jax.ops.router import router

__all__ = [
    "attention",
    "attention_gate",
    "combine",
    "expert_ffn",
    "expert_ffn_masters",
    "expert_ffn_nvfp4",
    "gate_coefficients",
    "gemm",
    "gemm_w4a4",
    "gemm_w4a16",
    "head",
    "kv_norm_rope",
    "log_prob",
    "numerics",
    "q_norm_rope",
    "quantize",
    "quantize_weight",
    "residual",
    "rms_norm",
    "rope_table",
    "router",
]
