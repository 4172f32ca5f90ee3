"""The fused step at the released layer shapes (hidden 8192, 128/16 heads, 256 experts of 4096, vocabulary 202048).

A slice of one full and one sliding layer against the CPU, byte for byte.
"""

import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from muse_jax import decode, make_mesh

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

CHAIN, TREE = 37, 16


def work(weights):
    """A chunk, two single steps, a tree of 16 rows: every output and tap."""
    rng = np.random.default_rng(0)
    vocab = weights.config.vocab_size
    found = []
    layers = jax.jit(decode.run_layers, static_argnames=("taps",), donate_argnames=("state",))
    head = jax.jit(decode.run_head)
    state = decode.init_state(weights.config, weights.mesh, capacity=128)
    output, state = decode.prefill(weights, state, [rng.integers(0, vocab, CHAIN).tolist()])
    found += [output.logits, output.token]
    for _ in range(2):
        output, state = jax.jit(decode.decode_step, donate_argnames=("state",))(weights, state, output.token)
        found += [output.logits, output.token]
    parents = [-1, *(int(rng.integers(0, n)) for n in range(1, TREE))]
    rows = decode.tree_rows(rng.integers(0, vocab, TREE).tolist(), parents, length=CHAIN + 2)
    stream, state, taps = layers(weights, state, rows, taps=True)
    output = head(weights, state, rows, stream)
    found += [stream, taps.residuals, taps.experts, taps.weights, output.logits, output.token]
    found += [state.k_full, state.v_full, state.k_ring, state.v_ring]
    return [np.asarray(x) for x in found]


@pytest.mark.parametrize("count", [1, 2])
def test_released_slice(count):
    from released import on_mesh, random_decode_weights, slice_config

    gpus = jax.devices("gpu")
    if len(gpus) < count:
        pytest.skip(f"needs {count} GPUs")
    weights = random_decode_weights(slice_config(2), make_mesh(gpus[:count]))
    found = work(weights)
    expected = work(on_mesh(weights, make_mesh(jax.devices("cpu")[:1])))
    differing = [int((a.view(np.uint8) != b.view(np.uint8)).sum()) for a, b in zip(found, expected, strict=True)]
    assert differing == [0] * len(differing)
    print(f"{sum(a.nbytes for a in found):,} bytes compared, 0 differ")
