"""Small drafts, and both implementations of them on the same features."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from oracle import dflash as oracle
from safetensors.numpy import save_file

from muse_jax.config import MuseSparkConfig
from muse_jax.speculative import dflash_reference as reference
from muse_jax.speculative.dflash import DFlashDraft
from muse_jax.speculative.dflash_config import DFlashConfig
from muse_jax.speculative.dflash_model import Context
from muse_jax.speculative.dflash_weights import random_draft
from muse_jax.speculative.draft import Seen

CAPACITY = 8000
CHUNK = 8

V2 = DFlashConfig(
    vocab_size=96, hidden_size=128, num_attention_heads=8, num_key_value_heads=2, head_dim=16, intermediate_size=128,
    windows=(12, None), rope_theta=1e4, rms_norm_eps=1e-5, tap_layers=(1, 2, 3), mask_token_id=94,
    output_multiplier=2.0, final_logit_softcapping=20.0, block_width=8, top_k=6, selector_rank=16, conv_group_size=16,
)  # fmt: skip
V1 = V2.replace(selector_rank=None, conv_group_size=None)
# One layer: a row's output depends on the context through its own attention alone.
SINGLE = V1.replace(windows=(12,))
RING = 12 + 2 * 8  # rows of the sliding layers

observe = jax.jit(DFlashDraft.observe)
propose = jax.jit(DFlashDraft.propose)


def normal(seed: int, *shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.bfloat16)


def make(config: DFlashConfig, seed: int = 0, width: int | None = None) -> DFlashDraft:
    table, head = (normal(seed + i, config.vocab_size, config.hidden_size) for i in (1, 2))
    return random_draft(config, jax.random.key(seed, impl="rbg"), 3 * table, head / 11, width=width)


def weights(draft: DFlashDraft) -> dict[str, np.ndarray]:
    return {name: np.asarray(array) for name, array in draft.params.items()}


def features(seed: int, count: int) -> jax.Array:
    """Of one sequence: bf16 [1, T, E, H]."""
    return normal(seed, 1, count, 3, 128)


def seen(given, count, lengths) -> Seen:
    """Features [B, T, E, H] of `count` tokens from `lengths` on."""
    return Seen(jnp.zeros(given.shape[:2], jnp.int32), given, jnp.asarray(count), jnp.asarray(lengths))


def nothing(draft: DFlashDraft, batch: int = 1) -> Seen:
    return Seen.none(draft, batch, draft.config.hidden_size)


def lattice(draft: DFlashDraft, context: Context, token, lengths):
    """Candidates and log-probabilities for trees as wide as the draft's, by the reference."""
    hidden = reference.hidden_states(draft.config, draft.params, context, blocks(draft, token), lengths)
    return reference.lattice(draft.config, draft.params, draft.head, hidden[:, 1 : max(draft.width, 2)], token)


def ints(*values: int) -> jax.Array:
    return jnp.array(values, jnp.int32)


def feed(draft: DFlashDraft, carry, given: jax.Array, first: int = 0, chunk: int = CHUNK):
    """One sequence's features in calls of `chunk` rows; the last is filled up with NaN."""
    for start in range(0, given.shape[1], chunk):
        part = given[:, start : start + chunk]
        count = part.shape[1]
        part = jnp.pad(part, ((0, 0), (0, chunk - count), (0, 0), (0, 0)), constant_values=jnp.nan)
        carry = observe(draft, carry, seen(part, ints(count), ints(first + start)))
    return carry


def context(draft: DFlashDraft, length: int, seed: int = 5, observed: int = 70):
    """(our context, the oracle's) of a sequence of `length` tokens of which the last `observed` were."""
    count = min(length, observed)
    given = features(seed, 70)[:, 70 - count :]
    ours = feed(draft, draft.start(batch=1, capacity=CAPACITY), given, length - count)
    theirs = oracle.new_context(draft.config)
    oracle.inject(draft.config, weights(draft), theirs, np.asarray(given[0]), length - count)
    return ours, theirs


def blocks(draft: DFlashDraft, token) -> jax.Array:
    """What is forwarded, bf16 [B, W, H]: a plain row of the table, and then the mask's."""
    rows = draft.embedding[token][:, None]
    masks = (len(rows), draft.config.block_width - 1, draft.config.hidden_size)
    return jnp.concatenate([rows, jnp.broadcast_to(draft.mask_embedding, masks)], axis=1)


def block(draft: DFlashDraft, token: int) -> jax.Array:
    """The same of one sequence."""
    return blocks(draft, ints(token))


def rms(found, expected) -> float:
    """Of the difference, relative to that of what is expected."""
    found, expected = np.asarray(found, np.float64), np.asarray(expected, np.float64)
    if np.array_equal(found, expected):
        return 0.0
    return float(np.sqrt(np.mean((found - expected) ** 2) / np.mean(expected**2)))


def settings(config: DFlashConfig, **changes) -> dict:
    """A config.json with `dflash_config`, as z-lab's."""
    inner = {
        "block_size": config.block_width, "mask_token_id": config.mask_token_id, "conv_kernel_size": 2,
        "conv_group_size": config.conv_group_size, "selector_rank": config.selector_rank,
        "selector_top_k": config.top_k, "target_layer_ids": list(config.tap_layers),
        "output_multiplier": config.output_multiplier, "final_logit_softcapping": config.final_logit_softcapping,
    }  # fmt: skip
    return {
        "architectures": ["DFlash2DraftModel"], "model_type": "qwen3", "is_causal": False, "attention_bias": False,
        "hidden_act": "silu", "vocab_size": config.vocab_size, "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size, "head_dim": config.head_dim,
        "num_attention_heads": config.num_attention_heads, "num_key_value_heads": config.num_key_value_heads,
        "num_hidden_layers": config.num_layers, "num_target_layers": 3, "rms_norm_eps": config.rms_norm_eps,
        "rope_parameters": {"rope_theta": config.rope_theta, "rope_type": "default"}, "use_sliding_window": True,
        "sliding_window": 12, "layer_types": ["sliding_attention", "full_attention"],
        "dflash_config": {name: value for name, value in inner.items() if value is not None}, **changes,
    }  # fmt: skip


def write(folder: Path, tensors: dict, config: dict) -> Path:
    """A draft's folder."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    return folder


def write_tiny_draft(path: Path, *, taps: tuple[int, ...] = (1, 3), layers: int | None = None) -> Path:
    """A folder with a draft for the tiny checkpoint, or for its first layers."""
    target = MuseSparkConfig.tiny()
    config = V2.replace(
        vocab_size=target.vocab_size, hidden_size=target.hidden_size, intermediate_size=128, tap_layers=taps,
        mask_token_id=target.vocab_size - 1, output_multiplier=target.output_multiplier, selector_rank=8,
    )  # fmt: skip
    shared = jnp.zeros((target.vocab_size, target.hidden_size), jnp.bfloat16)
    draft = random_draft(config, jax.random.key(0), shared, shared)
    return write(path, weights(draft), settings(config, num_target_layers=layers or target.num_hidden_layers))
