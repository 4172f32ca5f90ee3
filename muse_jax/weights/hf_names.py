"""Names in Hugging Face checkpoints: prefixes, what the decoder has no use for, and the order of q and k rows."""

import re
from typing import Literal

import numpy as np

RowOrder = Literal["hf", "meta"]
"""Of q_proj and k_proj in files: "hf", a head's halves one after the other; "meta", adjacent pairs, as here."""
ROW_ORDERS: tuple[RowOrder, ...] = ("hf", "meta")
ROW_ORDER_KEY = "muse_jax_row_order"  # in the metadata of our safetensors files, where it is not "hf"

_PREFIXES = ("model.language_model.", "language_model.model.", "language_model.", "model.")

# Parts of the omni model beside the text decoder, and what runtimes leave in files; after removing a prefix above.
IGNORED_PREFIXES = (
    "vision_tower.", "vision_adapter.", "vision_projection.", "audio_tower.", "perception_emb_norm.", "rotary_emb.",
)  # fmt: skip
IGNORED_SUFFIXES = (
    ".rotary_emb.inv_freq", ".self_attn.q_scale", ".self_attn.k_scale", ".self_attn.v_scale",
    ".self_attn.k_proj.k_scale", ".self_attn.v_proj.v_scale",
)  # fmt: skip

_PER_EXPERT = re.compile(r"(layers\.\d+\.mlp\.experts\.)(\d+)\.(gate|up|down)_proj\.weight")
HEAD, _HALF = 64, 32  # rows of a head of q_proj or k_proj


def canonical(key: str) -> str | None:
    """A file's tensor name -> ours, or None for a tensor that the text decoder does not use."""
    name = key
    for prefix in _PREFIXES:
        if key.startswith(prefix):
            name = key[len(prefix) :]
            break
    if name.startswith(IGNORED_PREFIXES) or name.endswith(IGNORED_SUFFIXES):
        return None
    return name


def hf_key(name: str) -> str:
    """Our name -> the released checkpoint's."""
    return name if name == "lm_head.weight" else _PREFIXES[0] + name


def split_expert(name: str) -> tuple[str, int, str] | None:
    """'layers.3.mlp.experts.7.up_proj.weight' -> ('layers.3.mlp.experts.', 7, 'up'); None for any other name."""
    match = _PER_EXPERT.fullmatch(name)
    return (match[1], int(match[2]), match[3]) if match else None


def has_rotary_rows(name: str) -> bool:
    """Whether the parameter's rows come in another order in files than here."""
    return name.endswith((".self_attn.q_proj.weight", ".self_attn.k_proj.weight"))


def whole_heads(start: int, stop: int) -> tuple[int, int]:
    """The rows of all heads of which start to stop holds some."""
    return start // HEAD * HEAD, -(-stop // HEAD) * HEAD


def to_adjacent(rows: np.ndarray) -> np.ndarray:
    """[heads * 64, n], split halves per head (i, i + 32) -> adjacent pairs (2i, 2i + 1)."""
    return rows.reshape(-1, 2, _HALF, rows.shape[-1]).swapaxes(1, 2).reshape(rows.shape)


def to_split_halves(rows: np.ndarray) -> np.ndarray:
    """The inverse of `to_adjacent`."""
    return rows.reshape(-1, _HALF, 2, rows.shape[-1]).swapaxes(1, 2).reshape(rows.shape)
