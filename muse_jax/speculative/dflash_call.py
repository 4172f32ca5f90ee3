"""The custom call of a draft: what was committed into the context, the block's forward, candidates, trees."""

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from muse_jax import _cpu, _native  # noqa: F401  the second registers the handlers
from muse_jax.speculative.dflash_config import DFlashConfig
from muse_jax.speculative.dflash_model import Context, draft_specs
from muse_jax.speculative.draft import Seen
from muse_jax.speculative.tree import TokenTree

if TYPE_CHECKING:
    from muse_jax.speculative.dflash import DFlashDraft

TARGET = "muse_draft_v1"


def draft_call(
    draft: "DFlashDraft",
    context: Context,
    seen: Seen,
    token: jax.Array | None = None,
    lengths: jax.Array | None = None,
) -> tuple[TokenTree | None, Context]:
    """One custom call on every device: they all draft for themselves, and the same.

    Args:
        draft: weights and sizes.
        context: updated in place where it is donated.
        seen: of any length T.
        token, lengths: int32 [B], the roots of the trees and their positions; without them nothing is proposed.

    Returns:
        (trees or None, context).

    Raises:
        ValueError: features of another shape.
    """
    config, width = draft.config, 0 if token is None else draft.width
    batch, length = seen.token.shape
    expected = (batch, length, len(config.tap_layers), config.hidden_size)
    if seen.features.shape != expected:
        raise ValueError(f"features: given {list(seen.features.shape)}, expected [B, T, E, H] = {list(expected)}")
    rings = [part[layer] for layer in range(config.num_layers) for part in (context.k, context.v, context.position)]
    dims = _dims(config, width)
    windows = np.array([window or 0 for window in config.windows], np.int64)
    tree: list[jax.ShapeDtypeStruct] = []
    if width:
        shape = (batch, width)
        tree = [jax.ShapeDtypeStruct(shape, jnp.int32)] * 3 + [jax.ShapeDtypeStruct((*shape, width), jnp.bool_)]
    operands = [
        seen.features.astype(jnp.bfloat16), seen.count, seen.lengths,
        seen.count if token is None else token, seen.lengths if lengths is None else lengths,  # unread without trees
        jnp.asarray(config.frequencies), draft.embedding, draft.head, draft.mask_embedding, *rings,
        *(draft.params[name] for name in draft_specs(config)),
    ]  # fmt: skip

    workspace: list[jax.ShapeDtypeStruct] = []
    if _on_gpu(draft):
        slots = [x.shape[1] for x in context.k]
        size = _cpu.draft_workspace_bytes(dims.tolist(), slots, batch, length)
        workspace = [jax.ShapeDtypeStruct((size,), jnp.uint8)]

    def call(*operands: jax.Array):
        results = [*tree, *(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in rings), *workspace]
        aliases = {_FIRST_RING + i: len(tree) + i for i in range(len(rings))}
        return tuple(
            jax.ffi.ffi_call(TARGET, results, input_output_aliases=aliases)(
                *operands, dims=dims, scalars=_scalars(config), windows=windows
            )
        )

    with jax.named_scope("muse_draft"):
        if draft.mesh is not None:
            whole = PartitionSpec()
            call = jax.shard_map(call, mesh=draft.mesh, in_specs=whole, out_specs=whole, check_vma=False)
        out = call(*operands)
    found = out[len(tree) : len(tree) + len(rings)]
    context = Context(found[0::3], found[1::3], found[2::3])
    return TokenTree(*out[: len(tree)]) if width else None, context


_FIRST_RING = 9  # among the operands, as ffi/bindings/draft.cc reads them


def _on_gpu(draft: "DFlashDraft") -> bool:
    device = jax.devices()[0] if draft.mesh is None else next(iter(draft.mesh.devices.flat))
    return device.platform != "cpu"


def _dims(c: DFlashConfig, width: int) -> np.ndarray:
    """Attribute `dims`; read_dims in ffi/draft/plan.h has the same order."""
    return np.array(
        [c.hidden_size, c.num_attention_heads, c.num_key_value_heads, c.head_dim, c.intermediate_size,
         len(c.tap_layers), c.block_width, c.top_k, c.selector_rank or 0, c.conv_group_size or 0, c.vocab_size, width],
        np.int64,
    )  # fmt: skip


def _scalars(c: DFlashConfig) -> np.ndarray:
    return np.array([c.rms_norm_eps, c.output_multiplier, c.final_logit_softcapping, c.head_dim**-0.5], np.float32)
