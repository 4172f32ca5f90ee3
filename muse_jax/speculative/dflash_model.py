"""What DFlash and DFlash2 drafts (arXiv 2602.06036) consist of: parameters, and the context that they remember."""

import dataclasses

import jax
import jax.numpy as jnp

from muse_jax.speculative.dflash_config import DFlashConfig
from muse_jax.weights.names import BF16, ParamSpec


def draft_specs(config: DFlashConfig) -> dict[str, ParamSpec]:
    """All parameters of a draft, by z-lab's names; all are bf16. The embedding table and LM head are the target's."""
    h, i = config.hidden_size, config.intermediate_size
    q, kv = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
    table: list[tuple[str, tuple[int, ...]]] = [
        ("fc.weight", (h, len(config.tap_layers) * h)), ("hidden_norm.weight", (h,)),
    ]  # fmt: skip
    for layer in range(config.num_layers):
        p = f"layers.{layer}."
        table += [
            (p + "input_layernorm.weight", (h,)), (p + "post_attention_layernorm.weight", (h,)),
            (p + "self_attn.q_proj.weight", (q, h)), (p + "self_attn.k_proj.weight", (kv, h)),
            (p + "self_attn.v_proj.weight", (kv, h)), (p + "self_attn.o_proj.weight", (h, q)),
            (p + "self_attn.q_norm.weight", (config.head_dim,)), (p + "self_attn.k_norm.weight", (config.head_dim,)),
            (p + "mlp.gate_proj.weight", (i, h)), (p + "mlp.up_proj.weight", (i, h)),
            (p + "mlp.down_proj.weight", (h, i)),
        ]  # fmt: skip
        if config.conv_group_size is not None:
            for conv in ("attention_conv.", "mlp_conv."):
                table += [
                    (p + conv + "base_kernel", (2, 2, h)),
                    (p + conv + "kernel_projection.weight", (4 * h // config.conv_group_size, h)),
                ]
    table.append(("norm.weight", (h,)))
    if config.selector_rank is not None:
        codebook = (config.vocab_size, config.selector_rank)
        table += [
            ("candidate_selector.hidden_projection.weight", (config.selector_rank, h)),
            ("candidate_selector.predecessor_codebook", codebook),
            ("candidate_selector.successor_codebook", codebook),
        ]
    return {name: ParamSpec(name, shape, BF16) for name, shape in table}


@dataclasses.dataclass(frozen=True)
class Context:
    """What the draft remembers of the committed tokens: K and V of each layer. A pytree.

    A token at position j lies in row j mod C of a layer's ring. The rows of a block are never written here.
    """

    k: tuple[jax.Array, ...]
    """Each bf16 [B, C, kv_heads, head_dim], after RoPE; C differs between layers."""
    v: tuple[jax.Array, ...]
    position: tuple[jax.Array, ...]
    """Each int32 [B, C]: whose rows these are; -1 for none. So a token that was never observed is never seen."""


jax.tree_util.register_dataclass(Context, ["k", "v", "position"], [])


def empty_context(config: DFlashConfig, batch: int, capacity: int) -> Context:
    """Nothing seen, room for `capacity` positions."""
    sizes = [config.slots(layer, capacity) for layer in range(config.num_layers)]

    def rows() -> tuple[jax.Array, ...]:  # new ones each time: a carry may be donated, and no buffer may be so twice
        shape = (config.num_key_value_heads, config.head_dim)
        return tuple(jnp.zeros((batch, size, *shape), jnp.bfloat16) for size in sizes)

    return Context(rows(), rows(), tuple(jnp.full((batch, size), -1, jnp.int32) for size in sizes))
