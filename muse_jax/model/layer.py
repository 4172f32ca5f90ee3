"""One decoder layer."""

import jax
from flax import nnx

from muse_jax.config import MuseSparkConfig
from muse_jax.model.attention import Attention
from muse_jax.model.moe import MoE
from muse_jax.model.parts import ResidualGate, RMSNorm, Taps, record


class Layer(nnx.Module):
    """Attention and MoE branches around the fp32 residual stream `s` (docs/numerics.md section 7).

    Attention: 1. gained norm; 2 to 9. `Attention`; then the residual gate.
    MoE: 1. gained norm; 2 to 6. `MoE`; 6. scale-first norm; then the residual gate.
    """

    def __init__(self, config: MuseSparkConfig, layer: int, packed: bool):
        """Layer `layer`, with weights of zero; `packed`: its experts are stored as NVFP4 codes."""
        hidden, temperature = config.hidden_size, config.residual_gate_temperature
        self.input_layernorm = RMSNorm(hidden, config.rms_norm_eps)
        self.self_attn = Attention(config, layer)
        self.post_attention_residual_gate = ResidualGate(hidden, temperature)
        self.pre_feedforward_layernorm = RMSNorm(hidden, config.rms_norm_eps)
        self.mlp = MoE(config, layer, packed)
        self.post_feedforward_layernorm = RMSNorm(hidden, config.post_norm_eps, scale_first=True)
        self.post_feedforward_residual_gate = ResidualGate(hidden, temperature)
        self.layer = layer

    def __call__(self, s: jax.Array, positions: jax.Array, table: jax.Array, taps: Taps | None = None) -> jax.Array:
        """Stream fp32 [B, T_local, H], positions int32 [T_local], RoPE table fp32 [T_local, 64] -> stream.

        `taps` receives the branches' taps, `layers.{i}.post_attention_residual` and `.post_feedforward_residual`.
        """
        with jax.named_scope(f"layers.{self.layer}.attention"):
            s = self.attend(s, positions, table, taps)
        with jax.named_scope(f"layers.{self.layer}.moe"):
            y = self.mlp(self.pre_feedforward_layernorm(s), taps)
            s = self.add_moe(s, y)
        record(taps, f"layers.{self.layer}.post_feedforward_residual", s)
        return s

    def attend(self, s: jax.Array, positions: jax.Array, table: jax.Array, taps: Taps | None = None) -> jax.Array:
        """The attention branch and its gate: stream -> stream."""
        h = self.input_layernorm(s)
        n = self.self_attn(h, positions, table, taps)
        s = self.post_attention_residual_gate(s, n)
        record(taps, f"layers.{self.layer}.post_attention_residual", s)
        return s

    def add_moe(self, s: jax.Array, y: jax.Array) -> jax.Array:
        """The norm and the gate behind the MoE: stream and bf16 y [B, T_local, H] -> stream."""
        return self.post_feedforward_residual_gate(s, self.post_feedforward_layernorm(y))
