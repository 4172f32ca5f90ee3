"""One layer of one rank of eight in other ways than the fused kernel, for baselines.py.

The same model shapes, split over ranks as usual for tensor parallelism (heads, the experts' inner width, columns of the
projections around them), so that a rank reads the same number of weights. Exchanges cost nothing: what the peers would
send, the rank repeats from its own, and sums over ranks are left out.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from muse_jax import MuseSparkConfig, ops

BF16, F32 = jnp.bfloat16, jnp.float32
RANKS, HEAD = 8, 64
SCALE_2 = 1 / 64
_E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]

Weights = dict[str, jax.Array]
Experts = Callable[[jax.Array, jax.Array, Weights], jax.Array]
"""(e bf16 [T, M], chosen int32 [T, K], weights) -> bf16 [T, K, M]."""


def take(x: jax.Array, index: jax.Array) -> jax.Array:
    """x[index], spared the check of the index."""
    return x.at[index].get(mode="promise_in_bounds")


def dequantize(codes: jax.Array, scales: jax.Array) -> jax.Array:
    """NVFP4 codes uint8 [..., N/2] and scales e4m3 [..., N/16] -> bf16 [..., N]; exact, the products are short."""
    table = jnp.array(_E2M1 + [-x for x in _E2M1], BF16)
    nibbles = jnp.stack([codes & 15, codes >> 4], axis=-1).reshape(*scales.shape, 16)
    values = take(table, nibbles) * (scales.astype(BF16) * BF16(SCALE_2))[..., None]
    return values.reshape(*codes.shape[:-1], 2 * codes.shape[-1])


def make_weights(config: MuseSparkConfig, context: int, seed: int) -> Weights:
    """Random weights of one layer and one rank, row-major; the bf16 experts are the NVFP4 ones, expanded."""
    h, m, e = config.hidden_size, config.moe_hidden_size, config.num_local_experts
    q, kv = config.attention_size // RANKS, config.num_key_value_heads // RANKS
    inner = config.moe_intermediate_size // RANKS
    shapes = {
        "qkvu": (2 * q + 2 * kv * HEAD, h), "o": (h, q), "pre_expert": (m // RANKS, h), "post_expert": (h, m // RANKS),
        "k": (context, kv, HEAD), "v": (context, kv, HEAD),
    }  # fmt: skip
    keys = iter(list(jax.random.split(jax.random.key(seed), 16)))

    def small(shape: tuple[int, ...]) -> jax.Array:  # magnitudes 2^-7 to 2^-5
        bits = jax.random.bits(next(keys), shape, jnp.uint16)
        return lax.bitcast_convert_type((bits & 0x80FF) | 0x3C00, BF16)

    def scales(shape: tuple[int, ...]) -> jax.Array:  # 0.25 to 0.9375
        bits = 0x28 + (jax.random.bits(next(keys), shape, jnp.uint8) & 15)
        return lax.bitcast_convert_type(bits, jnp.float8_e4m3fn)

    def make() -> Weights:
        weights = {name: small(shape) for name, shape in shapes.items()}
        weights["router"] = small((e // RANKS, h)).astype(F32)
        for name, shape in (("w13", (e, 2 * inner, m)), ("w2", (e, m, inner))):
            weights[f"{name}_codes"] = jax.random.bits(next(keys), (*shape[:2], shape[2] // 2), jnp.uint8)
            weights[f"{name}_scales"] = scales((*shape[:2], shape[2] // 16))
            weights[name] = dequantize(weights[f"{name}_codes"], weights[f"{name}_scales"])
        return weights

    return jax.jit(make)()


def swiglu(gate_up: jax.Array) -> jax.Array:
    """Gate columns, then up columns -> silu(gate) * up, bf16."""
    gate, up = jnp.split(gate_up.astype(F32), 2, axis=-1)
    return (jax.nn.silu(gate) * up).astype(BF16)


def einsum(spec: str, *operands: jax.Array) -> jax.Array:
    """bf16 in and out, summed in fp32."""
    return jnp.einsum(spec, *operands, preferred_element_type=F32).astype(BF16)


def experts_per_token(e: jax.Array, chosen: jax.Array, w: Weights) -> jax.Array:
    """Gathers the weights of every (token, slot)."""
    hidden = swiglu(einsum("tm,tknm->tkn", e, take(w["w13"], chosen)))
    return einsum("tki,tkmi->tkm", hidden, take(w["w2"], chosen))


def experts_distinct(count: int, quantised: bool) -> Experts:
    """Gathers each chosen expert once, told how many there may be, and lets every row pass all of them."""

    def run(e: jax.Array, chosen: jax.Array, w: Weights) -> jax.Array:
        ids = jnp.unique(chosen, size=count, fill_value=w["w13"].shape[0] - 1)
        if quantised:
            w13, w2 = (dequantize(take(w[f"{n}_codes"], ids), take(w[f"{n}_scales"], ids)) for n in ("w13", "w2"))
        else:
            w13, w2 = take(w["w13"], ids), take(w["w2"], ids)
        f = einsum("tui,umi->tum", swiglu(einsum("tm,unm->tun", e, w13)), w2)
        return jnp.take_along_axis(f, jnp.searchsorted(ids, chosen)[..., None], axis=1)

    return run


def experts_loop(count: int) -> Experts:
    """One chosen expert after the other, two products each."""

    def run(e: jax.Array, chosen: jax.Array, w: Weights) -> jax.Array:
        ids = jnp.unique(chosen, size=count, fill_value=w["w13"].shape[0] - 1)

        def body(i: Any, f: jax.Array) -> jax.Array:
            w13, w2 = (lax.dynamic_index_in_dim(w[n], ids[i], keepdims=False) for n in ("w13", "w2"))
            one = einsum("ti,mi->tm", swiglu(einsum("tm,nm->tn", e, w13)), w2)
            return jnp.where((chosen == ids[i])[..., None], one[:, None], f)

        return lax.fori_loop(0, count, body, jnp.zeros((*chosen.shape, e.shape[1]), BF16))

    return run


def experts_ragged(e: jax.Array, chosen: jax.Array, w: Weights) -> jax.Array:
    """`lax.ragged_dot` over the pairs sorted by expert."""
    pairs, slots = chosen.reshape(-1), chosen.shape[1]
    order = jnp.argsort(pairs, stable=True)
    sizes = jnp.zeros(w["w13"].shape[0], jnp.int32).at[pairs].add(1)

    def product(x: jax.Array, weight: jax.Array) -> jax.Array:
        return lax.ragged_dot(x, jnp.swapaxes(weight, 1, 2), sizes, preferred_element_type=F32).astype(BF16)

    f = product(swiglu(product(e[order // slots], w["w13"])), w["w2"])
    return jnp.zeros_like(f).at[order].set(f).reshape(*chosen.shape, -1)


def experts_ours(config: MuseSparkConfig) -> Experts:
    """muse_jax's own op."""

    def run(e: jax.Array, chosen: jax.Array, w: Weights) -> jax.Array:
        count = w["w13_codes"].shape[0]
        return ops.expert_ffn_nvfp4(
            e, chosen, 0, w["w13_codes"], w["w13_scales"], jnp.full((count, 2), SCALE_2, F32), w["w2_codes"],
            w["w2_scales"], jnp.full((count,), SCALE_2, F32), jnp.full((2,), 1 / 64, F32),
            quantize_activations=config.activation_format == "nvfp4",
        )  # fmt: skip

    return run


class Xla:
    """The layer's other pieces as plain jnp, which XLA compiles."""

    def __init__(self, config: MuseSparkConfig):
        """For one model."""
        self.config = config

    def gemm(self, x: jax.Array, w: jax.Array) -> jax.Array:
        """x @ w.T, bf16."""
        return einsum("tk,nk->tn", x, w)

    def norm(self, x: jax.Array) -> jax.Array:
        """RMS norm of the last dimension, with a gain of one -> bf16."""
        x = x.astype(F32)
        return (x * lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + self.config.rms_norm_eps)).astype(BF16)

    def heads(self, q: jax.Array, k: jax.Array, v: jax.Array, table: jax.Array) -> tuple[jax.Array, ...]:
        """Head norms and rotation of q and k [T, heads, 64]."""

        def rotate(x: jax.Array) -> jax.Array:
            cos, sin = table[:, None, :32], table[:, None, 32:]
            even, odd = (self.norm(x)[..., i::2].astype(F32) for i in range(2))
            return jnp.stack([even * cos - odd * sin, even * sin + odd * cos], axis=-1).reshape(x.shape).astype(BF16)

        return rotate(q), rotate(k), v

    def attention(self, q: jax.Array, k: jax.Array, v: jax.Array, position: jax.Array) -> jax.Array:
        """Causal attention of q [T, heads, 64] over k, v [S, kv heads, 64]."""
        grouped = q.reshape(q.shape[0], k.shape[1], -1, HEAD)
        score = jnp.einsum("tngd,snd->ngts", grouped, k, preferred_element_type=F32)
        seen = jnp.arange(k.shape[0])[None, :] <= position[:, None]
        p = jax.nn.softmax(jnp.where(seen, score * (self.config.qk_scale_factor / 8), -jnp.inf), axis=-1)
        return einsum("ngts,snd->tngd", p.astype(BF16), v).reshape(q.shape)

    def gate(self, a: jax.Array, u: jax.Array) -> jax.Array:
        """Normed heads a [T, heads, 64] times sigmoid(u [T, heads * 64])."""
        return (self.norm(a).reshape(u.shape).astype(F32) * jax.nn.sigmoid(u.astype(F32))).astype(BF16)

    def logits(self, h: jax.Array, w: jax.Array) -> jax.Array:
        """The router's logits of the rank's own experts, fp32."""
        return jnp.einsum("th,eh->te", h.astype(F32), w) * self.config.output_multiplier

    def combine(self, f: jax.Array, weights: jax.Array, chosen: jax.Array) -> jax.Array:
        """The weighted sum of normed expert outputs [T, K, M] -> bf16 [T, M]."""
        return jnp.einsum("tk,tkm->tm", weights, self.norm(f).astype(F32)).astype(BF16)


class Ours(Xla):
    """The same pieces as muse_jax's own ops: one custom call each."""

    def gemm(self, x: jax.Array, w: jax.Array) -> jax.Array:
        """See Xla."""
        return ops.gemm(x, w)

    def norm(self, x: jax.Array) -> jax.Array:
        """See Xla."""
        return ops.rms_norm(x, eps=self.config.rms_norm_eps)

    def heads(self, q: jax.Array, k: jax.Array, v: jax.Array, table: jax.Array) -> tuple[jax.Array, ...]:
        """See Xla."""
        eps = self.config.rms_norm_eps
        return ops.q_norm_rope(q, table, eps=eps), *ops.kv_norm_rope(k, v, table, eps=eps)

    def attention(self, q: jax.Array, k: jax.Array, v: jax.Array, position: jax.Array) -> jax.Array:
        """See Xla."""
        return ops.attention(q, k, v, position, scale=self.config.qk_scale_factor / 8)

    def gate(self, a: jax.Array, u: jax.Array) -> jax.Array:
        """See Xla."""
        return ops.attention_gate(a, u, eps=self.config.rms_norm_eps)

    def logits(self, h: jax.Array, w: jax.Array) -> jax.Array:
        """See Xla."""
        choices = min(self.config.num_experts_per_tok, w.shape[0])
        multiplier, bias = self.config.output_multiplier, jnp.zeros(w.shape[0], F32)
        return ops.router(h, w, bias, experts_per_token=choices, multiplier=multiplier, scaling=1.0)[2]

    def combine(self, f: jax.Array, weights: jax.Array, chosen: jax.Array) -> jax.Array:
        """See Xla."""
        gain = jnp.zeros(f.shape[-1], BF16)
        return ops.combine(f, weights, chosen, gain, eps=self.config.post_norm_eps)


@dataclasses.dataclass(frozen=True)
class Layer:
    """A layer: its pieces, and how it computes its experts."""

    pieces: Xla
    experts: Experts

    def __call__(self, s: jax.Array, bias: jax.Array, position: jax.Array, table: jax.Array, w: Weights):
        """Stream fp32 [T, H], router bias [E], positions, RoPE rows, weights -> (stream, chosen [T, K])."""
        p, c = self.pieces, self.pieces.config
        rows, q = s.shape[0], c.attention_size // RANKS
        # attention
        qkvu = p.gemm(p.norm(s), w["qkvu"])
        kv = (qkvu.shape[1] - 2 * q) // 2
        parts = jnp.split(qkvu, [q, q + kv, q + 2 * kv], axis=1)
        q3, k3, v3 = (x.reshape(rows, -1, HEAD) for x in parts[:3])
        q3, k3, v3 = p.heads(q3, k3, v3, table)
        k3, v3 = jnp.concatenate([w["k"], k3]), jnp.concatenate([w["v"], v3])
        o = p.gate(p.attention(q3, k3, v3, position), parts[3])
        s = residual(s, p.norm(p.gemm(o, w["o"])))
        # MoE
        h = p.norm(s)
        scores = jax.nn.sigmoid(jnp.tile(p.logits(h, w["router"]), (1, RANKS)))
        chosen = lax.top_k(scores + bias, c.num_experts_per_tok)[1]
        weights = jnp.take_along_axis(scores, chosen, axis=1)
        weights = weights / weights.sum(axis=1, keepdims=True)
        e = p.norm(jnp.tile(p.gemm(h, w["pre_expert"]), (1, RANKS)))
        x = p.combine(self.experts(e, chosen, w), weights, chosen)
        y = p.gemm(x[:, : c.moe_hidden_size // RANKS], w["post_expert"])
        return residual(s, p.norm(y)), chosen


def residual(s: jax.Array, n: jax.Array) -> jax.Array:
    """The residual gate with the release's usual coefficients."""
    return 0.98712 * s + 0.16 * n.astype(F32)
