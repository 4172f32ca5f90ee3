"""DFlashDraft: DFlash and DFlash2 as a `Draft`, which draws a whole tree from one forward pass of a small model."""

import dataclasses
from collections.abc import Mapping

import jax
import jax.numpy as jnp

from muse_jax.speculative import dflash_model as model
from muse_jax.speculative.dflash_config import DFlashConfig
from muse_jax.speculative.dflash_model import Context
from muse_jax.speculative.tree import TokenTree, best_first
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
        return model.empty_context(self.config, batch, capacity)

    def observe(
        self, carry: Context, token: jax.Array, features: jax.Array, count: jax.Array, lengths: jax.Array
    ) -> Context:
        """Adds the features of committed tokens to the context; see `Draft`. Their ids are of no interest.

        Args:
            carry: before.
            token: int32 [B, T].
            features: bf16 [B, T, E, H], of the tapped layers in ascending order.
            count: int32 [B]: rows from here on leave no trace.
            lengths: int32 [B], the position of the first.

        Raises:
            ValueError: features of another shape.
        """
        expected = (*token.shape, len(self.tap_layers), self.config.hidden_size)
        if features.shape != expected:
            raise ValueError(f"features: given {list(features.shape)}, expected [B, T, E, H] = {list(expected)}")
        return model.inject(self.config, self.params, carry, features.astype(jnp.bfloat16), count, lengths)

    def propose(self, carry: Context, token: jax.Array, lengths: jax.Array) -> tuple[TokenTree, Context]:
        """The best-first trees below the newest tokens, int32 [B], at positions `lengths`; see `Draft`."""
        ids, log_probs = self.lattice(carry, token, lengths)
        return best_first(token, ids, log_probs, width=self.width)[0], carry

    def block(self, token: jax.Array) -> jax.Array:
        """What is forwarded for newest tokens int32 [B]: bf16 [B, block_width, H], the token and then masks."""
        masks = (token.shape[0], self.config.block_width - 1, self.config.hidden_size)
        return jnp.concatenate([self.embedding[token][:, None], jnp.broadcast_to(self.mask_embedding, masks)], axis=1)

    def lattice(self, carry: Context, token: jax.Array, lengths: jax.Array) -> tuple[jax.Array, jax.Array]:
        """What the trees are made of: candidates int32 [B, G, K] and their log-probabilities fp32 [B, G, P, K].

        G is a place less than the tree has nodes, but at least 1. DFlash gives one row for each place (P = 1), DFlash2
        one for each candidate of the place before (P = K).
        """
        config = self.config
        hidden = model.hidden_states(config, self.params, carry, self.block(token), lengths)
        hidden = hidden[:, 1 : max(self.width, 2)]  # row 0's place is known, and no node is deeper than width - 1
        logits = model.raw_logits(hidden, self.head)
        ids = model.candidates(config, logits)
        if not config.is_v2:
            return ids, model.marginal_log_probs(config, logits, ids)
        scores = model.pair_scores(config, self.params, hidden, logits, ids, token)
        return ids, jax.nn.log_softmax(scores, axis=-1)


jax.tree_util.register_dataclass(
    DFlashDraft, ["params", "embedding", "head", "mask_embedding"], ["config", "width"]
)  # fmt: skip


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
    width = config.block_width if width is None else width
    if not 1 <= width <= config.block_width:
        raise ValueError(f"width: given {width}, allowed: 1 to {config.block_width}, the block's width")
    problems = compare(model.draft_specs(config), params, lambda name: name)
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
    return DFlashDraft(config, width, dict(params), embedding, head, mask)
