"""A small model for the tests of weights, and a quantiser that needs no native code."""

import sys
import types

import ml_dtypes
import numpy as np
from oracle.quant import quantise_weights

from muse_jax.config import MuseSparkConfig

SMALL = MuseSparkConfig.tiny().replace(
    vocab_size=64, hidden_size=128, num_hidden_layers=3, num_attention_heads=8, moe_intermediate_size=128,
    num_local_experts=8, num_experts_per_tok=2,
    layer_types=("sliding_attention", "sliding_attention", "full_attention"),
    layer_rope_theta=(500000.0, 500000.0, 0.0), bos_token_id=1, eos_token_ids=(2,), pad_token_id=None,
    expert_formats=("bf16", "nvfp4", "bf16"),
)  # fmt: skip


def oracle_quantize_weight(w):
    """bf16 [G, N, K] -> what muse_jax.ops.quantize_weight promises, by the NumPy oracle."""
    made = [quantise_weights(np.asarray(group)) for group in w]
    codes, scales, scale_2 = (np.stack(parts) for parts in zip(*made, strict=True))
    return codes, scales.astype(np.uint8).view(ml_dtypes.float8_e4m3fn), scale_2


def use_oracle_quantiser(monkeypatch):
    """Makes `from muse_jax.ops import quantize_weight` give the oracle's."""
    module = types.ModuleType("muse_jax.ops")
    module.quantize_weight = oracle_quantize_weight  # type: ignore
    monkeypatch.setitem(sys.modules, "muse_jax.ops", module)


def same_bytes(a, b) -> bool:
    """Two parameter dicts with the same names in the same order, dtypes, shapes and bytes."""
    return list(a) == list(b) and all(
        a[n].dtype == b[n].dtype
        and a[n].shape == b[n].shape
        and np.asarray(a[n]).tobytes() == np.asarray(b[n]).tobytes()
        for n in a
    )


def tree(folder) -> dict[str, bytes]:
    """Every file below a folder and its bytes."""
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}
