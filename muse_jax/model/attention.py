"""The attention branch of a layer."""

import jax
import jax.numpy as jnp
from flax import nnx

from muse_jax import ops
from muse_jax.config import MuseSparkConfig
from muse_jax.model.moves import all_tokens
from muse_jax.model.parts import Linear, Taps, record

HEAD = 64


class Attention(nnx.Module):
    """Steps 2 to 9 of docs/numerics.md section 7, "Attention"; the layer does step 1.

    2. `q, k, v, u = R(gemm(h, .))`.
    3. q and k normalised per head, rotated on layers with positions.
    4. k and v as the cache holds them.
    5. Scores, and the numerators `p` of the softmax, without a running maximum.
    6. Numerators `N_d` and denominator `D` in chunks of absolute positions.
    7. `a_d = R(N_d / D)`.
    8. `o = R((a * r64) * sigmoid(u))`.
    9. `y = R(gemm(o, o_proj))`, normalised without weight.

    Parameters: q_proj, gate_proj [heads * 64, H], k_proj, v_proj [kv_heads * 64, H], o_proj [H, heads * 64], all bf16,
    q and k rows in adjacent-pair order.
    """

    def __init__(self, config: MuseSparkConfig, layer: int):
        """The branch of layer `layer`, with weights of zero."""
        hidden, keys = config.hidden_size, config.num_key_value_heads * HEAD
        self.q_proj = Linear(hidden, config.attention_size)
        self.k_proj = Linear(hidden, keys)
        self.v_proj = Linear(hidden, keys)
        self.gate_proj = Linear(hidden, config.attention_size)
        self.o_proj = Linear(config.attention_size, hidden)
        self.layer = layer
        self.eps = config.rms_norm_eps
        self.post_eps = config.post_norm_eps
        self.scale = config.qk_scale_factor / 8
        self.window = config.sliding_window if config.layer_types[layer] == "sliding_attention" else None
        self.rotate = config.layer_rope_theta[layer] != 0

    def __call__(self, h: jax.Array, positions: jax.Array, table: jax.Array, taps: Taps | None = None) -> jax.Array:
        """The branch n of one device's tokens.

        Args:
            h: bf16 [B, T_local, H], the normalised stream.
            positions: int32 [T_local], absolute.
            table: fp32 [T_local, 64], RoPE cosines and sines of these positions; layers without RoPE ignore it.
            taps: receives `layers.{i}.k` and `.v`, bf16 [B, T_local, kv_heads, 64].

        Returns:
            bf16 [B, T_local, H].
        """
        batch, length, _ = h.shape
        rows = jnp.broadcast_to(table, (batch, length, HEAD)) if self.rotate else None
        # 2
        q = self.q_proj(h).reshape(batch, length, -1, HEAD)
        k = self.k_proj(h).reshape(batch, length, -1, HEAD)
        v = self.v_proj(h).reshape(batch, length, -1, HEAD)
        u = self.gate_proj(h)
        # 3 and 4
        q = ops.q_norm_rope(q, rows, eps=self.eps)
        k, v = ops.kv_norm_rope(k, v, rows, eps=self.eps)
        record(taps, f"layers.{self.layer}.k", k)
        record(taps, f"layers.{self.layer}.v", v)
        # 5 to 7
        a = ops.attention(q, all_tokens(k), all_tokens(v), positions, scale=self.scale, window=self.window)
        # 8
        o = ops.attention_gate(a, u, eps=self.eps)
        # 9
        y = self.o_proj(o)
        return ops.rms_norm(y, eps=self.post_eps)
