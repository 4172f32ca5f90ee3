"""The mixture-of-experts branch of a layer: router, routed experts, projections into and out of their width."""

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from muse_jax import ops
from muse_jax.config import MuseSparkConfig
from muse_jax.mesh import AXIS
from muse_jax.model.moves import all_rows, bring_home
from muse_jax.model.parts import Buffer, Linear, RMSNorm, Taps, record


class Router(nnx.Module):
    """Step 2 of the MoE: the K experts of each row and their weights, all in fp32.

    Parameters: weight fp32 [E, H]; e_score_correction_bias fp32 [E], which takes part in the choice only.
    """

    def __init__(self, config: MuseSparkConfig):
        """A router with weights of zero."""
        self.weight = nnx.Param(jnp.zeros((config.num_local_experts, config.hidden_size), jnp.float32))
        self.e_score_correction_bias = Buffer(jnp.zeros((config.num_local_experts,), jnp.float32))
        self.experts_per_token = config.num_experts_per_tok
        self.multiplier = config.output_multiplier
        self.scaling = config.routed_scaling_factor

    def __call__(self, h: jax.Array) -> tuple[jax.Array, jax.Array]:
        """bf16 h [..., H] -> experts int32 [..., K] in descending order of their keys, weights fp32 [..., K]."""
        experts, weights, _ = ops.router(
            h,
            self.weight[...],
            self.e_score_correction_bias[...],
            experts_per_token=self.experts_per_token,
            multiplier=self.multiplier,
            scaling=self.scaling,
        )
        return experts, weights


class Experts(nnx.Module):
    """Steps 4 and 5 of the MoE, spread over the devices by expert.

    4. Each row goes to all devices, each device's experts serve the rows that chose them, each result comes home.
    5. A row's K results are scaled, normalised, weighted and added in ascending expert id.

    Parameters, with E_local = E / devices when called: gate_up_proj [E_local, 2I, M] (gate rows first) and down_proj
    [E_local, M, I], bf16, or NVFP4 codes with their scales (docs/architecture.md); post_expert_norm [M]. Which of both
    they are shows in the dtype. bf16 weights of a layer whose arithmetic is NVFP4 are masters: quantised here, with
    straight-through gradients.
    """

    def __init__(self, config: MuseSparkConfig, layer: int, packed: bool):
        """All experts of layer `layer`, with weights of zero; `packed`: stored as NVFP4 codes."""
        count, m, i = config.num_local_experts, config.moe_hidden_size, config.moe_intermediate_size
        if packed:
            self.gate_up_proj = Buffer(jnp.zeros((count, 2 * i, m // 2), jnp.uint8))
            self.gate_up_proj_weight_scale = Buffer(jnp.zeros((count, 2 * i, m // 16), jnp.float8_e4m3fn))
            self.gate_up_proj_weight_scale_2 = Buffer(jnp.zeros((count, 2), jnp.float32))
            self.gate_up_proj_input_scale = Buffer(jnp.zeros((count, 2), jnp.float32))
            self.down_proj = Buffer(jnp.zeros((count, m, i // 2), jnp.uint8))
            self.down_proj_weight_scale = Buffer(jnp.zeros((count, m, i // 16), jnp.float8_e4m3fn))
            self.down_proj_weight_scale_2 = Buffer(jnp.zeros((count,), jnp.float32))
            self.down_proj_input_scale = Buffer(jnp.zeros((count,), jnp.float32))
        else:
            self.gate_up_proj = nnx.Param(jnp.zeros((count, 2 * i, m), jnp.bfloat16))
            self.down_proj = nnx.Param(jnp.zeros((count, m, i), jnp.bfloat16))
        self.post_expert_norm = RMSNorm(m, config.post_norm_eps)
        self.nvfp4 = config.expert_formats[layer] == "nvfp4"
        self.quantize_activations = config.activation_format == "nvfp4"

    def __call__(self, e: jax.Array, experts: jax.Array, weights: jax.Array) -> jax.Array:
        """bf16 rows e [B, T_local, M], experts int32 and weights fp32 [B, T_local, K] -> bf16 x [B, T_local, M]."""
        f = self.exchange(e.reshape(-1, e.shape[-1]), experts.reshape(-1, experts.shape[-1]))
        return self.combine(f.reshape(*experts.shape, e.shape[-1]), experts, weights)

    def combine(self, f: jax.Array, experts: jax.Array, weights: jax.Array) -> jax.Array:
        """Results bf16 f [..., K, M] of the experts [..., K] -> their weighted sum bf16 x [..., M]."""
        return ops.combine(f, weights, experts, self.post_expert_norm.weight[...], eps=self.post_expert_norm.eps)

    def exchange(self, e: jax.Array, experts: jax.Array) -> jax.Array:
        """Each device's rows e bf16 [rows, M] with their choices [rows, K] -> their results bf16 [rows, K, M].

        Only moves data around the experts' own arithmetic: no capacity, nothing dropped, nothing added up.
        """
        local = self.gate_up_proj[...].shape[0]
        first = (lax.axis_index(AXIS) * local).astype(jnp.int32)
        f = self.local_experts(all_rows(e), all_rows(experts), first)
        return bring_home(f, experts // local)

    def local_experts(self, e: jax.Array, experts: jax.Array, first: jax.Array) -> jax.Array:
        """Rows bf16 [rows, M] -> bf16 [rows, K, M], zero but for this device's experts, first and those after it."""
        w13, w2 = self.gate_up_proj[...], self.down_proj[...]
        if not self.nvfp4:
            return ops.expert_ffn(e, experts, first, w13, w2)
        if w13.dtype != jnp.uint8:
            unit = jnp.ones((2,), jnp.float32)
            return ops.expert_ffn_masters(
                e, experts, first, w13, w2, unit, quantize_activations=self.quantize_activations
            )
        return ops.expert_ffn_nvfp4(
            e,
            experts,
            first,
            w13,
            self.gate_up_proj_weight_scale[...],
            self.gate_up_proj_weight_scale_2[...],
            w2,
            self.down_proj_weight_scale[...],
            self.down_proj_weight_scale_2[...],
            self.input_scales(),
            quantize_activations=self.quantize_activations,
        )

    def input_scales(self) -> jax.Array:
        """fp32 [2]: the largest input scale of all the layer's experts, for gate and up, and for down."""
        scales = jnp.stack([jnp.max(self.gate_up_proj_input_scale[...]), jnp.max(self.down_proj_input_scale[...])])
        return lax.pmax(lax.stop_gradient(scales), AXIS)  # pmax has no derivative


class MoE(nnx.Module):
    """Steps 2 to 6 of docs/numerics.md section 7, "MoE"; the layer does step 1 and the norm of step 6.

    2. Router: K experts and their weights.
    3. `e = R(gemm(h, pre_expert_proj))`, then the gained norm over M.
    4. The chosen experts' feed-forward networks.
    5. Their weighted sum, each output scaled and normalised first.
    6. `y = R(gemm(x, post_expert_proj))`.

    Parameters: gate (the router), pre_expert_proj [M, H], pre_expert_norm [M], experts, post_expert_proj [H, M].
    """

    def __init__(self, config: MuseSparkConfig, layer: int, packed: bool):
        """The branch of layer `layer`, with weights of zero; `packed`: its experts are stored as NVFP4 codes."""
        hidden, width = config.hidden_size, config.moe_hidden_size
        self.gate = Router(config)
        self.pre_expert_proj = Linear(hidden, width)
        self.pre_expert_norm = RMSNorm(width, config.rms_norm_eps)
        self.experts = Experts(config, layer, packed)
        self.post_expert_proj = Linear(width, hidden)
        self.layer = layer

    def __call__(self, h: jax.Array, taps: Taps | None = None) -> jax.Array:
        """bf16 h [B, T_local, H] -> bf16 y [B, T_local, H].

        `taps` receives `layers.{i}.router_experts` int32 and `layers.{i}.router_weights` fp32, [B, T_local, K].
        """
        # 2 and 3
        e, experts, weights = self.route(h, taps)
        # 4 and 5
        x = self.experts(e, experts, weights)
        # 6
        return self.post_expert_proj(x)

    def route(self, h: jax.Array, taps: Taps | None = None) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Steps 2 and 3: bf16 h [..., H] -> what the experts see: bf16 e [..., M], experts and weights [..., K]."""
        # 2
        experts, weights = self.gate(h)
        record(taps, f"layers.{self.layer}.router_experts", experts)
        record(taps, f"layers.{self.layer}.router_weights", weights)
        # 3
        return self.pre_expert_norm(self.pre_expert_proj(h)), experts, weights
