"""Speculative decoding: a draft proposes a tree of tokens, one step of the target verifies it, nothing changes."""

from muse_jax.speculative.accept import Accepted, accept
from muse_jax.speculative.dflash import DFlashDraft
from muse_jax.speculative.dflash_config import DFlashConfig
from muse_jax.speculative.draft import Draft, NoDraft, Seen
from muse_jax.speculative.prompts import prefill_both
from muse_jax.speculative.step import Verified, pick, speculative_step
from muse_jax.speculative.tree import TokenTree, best_first, chain, make_tree

__all__ = [
    "Accepted",
    "DFlashConfig",
    "DFlashDraft",
    "Draft",
    "NoDraft",
    "Seen",
    "TokenTree",
    "Verified",
    "accept",
    "best_first",
    "chain",
    "make_tree",
    "pick",
    "prefill_both",
    "speculative_step",
]
