"""DFlashDraft: DFlash and DFlash2 as a `Draft`, which draws a whole tree from one forward pass of a small model."""

import dataclasses
from collections.abc import Mapping

import jax
from jax.sharding import Mesh, NamedSharding

from muse_jax.speculative.dflash_call import draft_call
from muse_jax.speculative.dflash_config import DFlashConfig
from muse_jax.speculative.dflash_model import Context, draft_specs, empty_context
from muse_jax.speculative.draft import Seen
from muse_jax.speculative.tree import TokenTree
from muse_jax.weights.names import BF16, compare, describe


@dataclasses.dataclass(frozen=True)
class DFlashDraft:
    """A draft model with the target's embedding table and LM head, which are shared and not copied. A pytree.

    Built by `make_draft`, `load_draft` or `random_draft`, which check what is given. Satisfies the protocol `Draft`;
    its carry is a `Context`.
    """

    config: DFlashConfig
    width: int
    """Nodes of each tree; 1 to `config.block_width`, however wide the block that is forwarded."""
    params: dict[str, jax.Array]
    """As in `draft_specs`."""
    embedding: jax.Array
    """bf16 [V, H]: the target's table, whose plain rows are used, without the target's norm of them."""
    head: jax.Array
    """bf16 [V, H], the target's."""
    mask_embedding: jax.Array
    """bf16 [H], what stands for the tokens to be predicted."""
    mesh: Mesh | None
    """The target's, each device of which drafts for itself; None for a draft on one device."""

    @property
    def tap_layers(self) -> tuple[int, ...]:
        """The target's layers after which its residual stream is seen."""
        return self.config.tap_layers

    def start(self, *, batch: int, capacity: int) -> Context:
        """Rings for `batch` sequences of up to `capacity` positions, nothing seen yet.

        Raises:
            ValueError: not positive.
        """
        if batch < 1 or capacity < 1:
            raise ValueError(f"batch, capacity: given {batch}, {capacity}, allowed: 1 or more")
        return empty_context(self.config, batch, capacity)

    def observe(self, carry: Context, seen: Seen) -> Context:
        """Adds the features of committed tokens to the context; see `Draft`. Their ids are of no interest.

        Raises:
            ValueError: features of another shape.
        """
        return draft_call(self, carry, seen)[1]

    def propose(self, carry: Context, seen: Seen, token: jax.Array, lengths: jax.Array) -> tuple[TokenTree, Context]:
        """The best-first trees below the newest tokens, int32 [B], at positions `lengths`; see `Draft`.

        Raises:
            ValueError: features of another shape.
        """
        tree, carry = draft_call(self, carry, seen, token, lengths)
        assert tree is not None
        return tree, carry


jax.tree_util.register_dataclass(
    DFlashDraft, ["params", "embedding", "head", "mask_embedding"], ["config", "width", "mesh"]
)  # fmt: skip


def tree_width(config: DFlashConfig, width: int | None) -> int:
    """Nodes of each tree: `width`, or the block's.

    Raises:
        ValueError: says what is allowed.
    """
    width = config.block_width if width is None else width
    if not 1 <= width <= config.block_width:
        raise ValueError(f"width: given {width}, allowed: 1 to {config.block_width}, the block's width")
    return width


def make_draft(
    config: DFlashConfig, params: Mapping[str, jax.Array], embedding: jax.Array, head: jax.Array, *,
    width: int | None = None, mask_embedding: jax.Array | None = None,
) -> DFlashDraft:  # fmt: skip
    """A draft of parameters at hand.

    Args:
        config: the draft's.
        params: as in `draft_specs`.
        embedding: bf16 [V, H], the target's "embed_tokens.weight".
        head: bf16 [V, H], the target's "lm_head.weight".
        width: nodes of each tree, by default the block's width.
        mask_embedding: bf16 [H], a learned row in place of the table's row of the mask token.

    Raises:
        ValueError: lists every array that is missing, unexpected or of another shape, or says what width is allowed.
    """
    width = tree_width(config, width)
    problems = compare(draft_specs(config), params, lambda name: name)
    shared = {"embedding": (embedding, (config.vocab_size, config.hidden_size)), "head": (head, embedding.shape)}
    if mask_embedding is not None:
        shared["mask_embedding"] = (mask_embedding, (config.hidden_size,))
    problems += [
        f"{name}: expected {describe(shape, BF16)}, found {describe(array.shape, array.dtype)}"
        for name, (array, shape) in shared.items()
        if array.shape != shape or array.dtype != BF16
    ]
    if problems:
        raise ValueError("\n".join(["these parameters do not fit the draft's configuration:", *problems]))
    mask = embedding[config.mask_token_id] if mask_embedding is None else mask_embedding
    sharding = head.sharding
    mesh = sharding.mesh if isinstance(sharding, NamedSharding) and isinstance(sharding.mesh, Mesh) else None
    return DFlashDraft(config, width, dict(params), embedding, head, mask, mesh)
