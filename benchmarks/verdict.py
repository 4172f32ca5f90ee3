"""The parity verdict that stands beside every speed: the same build, all eight ranks, against the CPU backend.

The model is a small one of the released proportions, so that the CPU needs a second or two;
tests/gpu/test_released_shapes.py compares the released shapes themselves.
"""

import dataclasses
from typing import Any

import jax
import numpy as np
from released import on_mesh, random_decode_weights

from muse_jax import MuseSparkConfig, decode, make_mesh
from muse_jax.decode import DecodeWeights

CHAIN, TREE = 40, 16


@dataclasses.dataclass(frozen=True)
class Verdict:
    """What a comparison found."""

    differing: int
    compared: int

    def __str__(self) -> str:
        """For printing."""
        found = "0" if not self.differing else f"{self.differing:,} (NOT THE SAME BITS)"
        return f"{found} of {self.compared:,} bytes differ from the CPU's"


def small_config() -> MuseSparkConfig:
    """Two layers, a sliding one with bf16 experts and a full one with NVFP4: an eighth of the released sizes.

    The heads are 64 and 8, as wide a group as the release's, because every rank needs one of the eight.
    """
    full = MuseSparkConfig.released()
    return full.replace(
        num_hidden_layers=2, layer_types=full.layer_types[:2], layer_rope_theta=full.layer_rope_theta[:2],
        expert_formats=("bf16", "nvfp4"), hidden_size=full.hidden_size // 8, num_attention_heads=64,
        num_key_value_heads=8, moe_hidden_size=full.moe_hidden_size // 8,
        moe_intermediate_size=full.moe_intermediate_size // 8, num_local_experts=full.num_local_experts // 8,
        vocab_size=full.vocab_size // 8, sliding_window=32, bos_token_id=0, eos_token_ids=(), pad_token_id=None,
    )  # fmt: skip


def outputs(weights: DecodeWeights) -> list[np.ndarray]:
    """A chunk of a prompt, then a draft tree: logits, tokens, streams, routing and caches."""
    rng = np.random.default_rng(0)
    vocab = weights.config.vocab_size
    state = decode.init_state(weights.config, weights.mesh, capacity=128)
    output, state = decode.prefill(weights, state, [rng.integers(0, vocab, CHAIN).tolist()])
    found = [output.logits, output.token]
    parents = [-1, *(int(rng.integers(0, n)) for n in range(1, TREE))]
    rows = decode.tree_rows(rng.integers(0, vocab, TREE).tolist(), parents, length=CHAIN)
    layers = jax.jit(lambda w, s: decode.run_layers(w, s, rows, taps=True), donate_argnums=1)
    stream, state, taps = layers(weights, state)
    output = jax.jit(lambda w, s, x: decode.run_head(w, s, rows, x))(weights, state, stream)
    found += [stream, taps.residuals, taps.experts, taps.weights, output.logits, output.token]
    found += [state.k_full, state.v_full, state.k_ring, state.v_ring]
    return [np.asarray(x) for x in found]


def compare(weights: DecodeWeights) -> Verdict:
    """The same weights' outputs here and on one CPU device, byte for byte."""
    try:
        cpu = jax.devices("cpu")[:1]
    except RuntimeError:
        raise SystemExit(
            "the parity verdict needs JAX's CPU backend: unset JAX_PLATFORMS or make it cuda,cpu"
        ) from None
    pairs = list(zip(outputs(weights), outputs(on_mesh(weights, make_mesh(cpu))), strict=True))
    differing = sum(int((a.view(np.uint8) != b.view(np.uint8)).sum()) for a, b in pairs)
    return Verdict(differing, sum(a.nbytes for a, _ in pairs))


def verdict(device: Any) -> Verdict:
    """The small model on one device that holds all eight ranks, against the CPU."""
    weights = random_decode_weights(small_config(), make_mesh([device]))
    try:
        found = compare(weights)
        weights.communicator.check()
        return found
    finally:
        weights.communicator.close()
