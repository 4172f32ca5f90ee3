"""How calls of the simulated kernels end that cannot go on: in an error that says who waited where, or what lacks."""

import dflash_helpers
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from decode_helpers import make_model, small, step
from op_helpers import same

from muse_jax.decode import next_rows, run_layers

LIMIT = 4.0  # seconds; simulated blocks are slow


@pytest.mark.parametrize("devices", [1, 4])
def test_silent_rank(devices):
    """Every block leaves, the results are NaN, later steps refuse, and a rebuilt communicator works."""
    model = make_model(small(), devices=devices)
    weights, rows = model.weights, next_rows(jnp.zeros(1, jnp.int32), jnp.array([5]))
    stream, _, _ = run_layers(weights, model.state(), rows, silent_rank=5, wait_limit=LIMIT)
    assert np.isnan(np.asarray(stream)).all()
    # On a GPU who waits for rank 5 reports first (tests/gpu/test_failures.py); simulated blocks are too slow for that.
    blamed = r"rank [0-7] waited in layer 0, (o_proj exchange|branch all-gather), for rank [0-7]"
    with pytest.raises(RuntimeError, match=blamed):
        weights.communicator.check()
    with pytest.raises(jax.errors.JaxRuntimeError, match="an earlier step failed"):
        jax.block_until_ready(run_layers(weights, model.state(), rows, wait_limit=LIMIT)[0])
    weights.communicator.rebuild()
    output, _ = step(weights, model.state(), [5])
    same(output.logits, model.oracle([5])["logits"])


def test_bad_row():
    """A token out of range, seen by the kernel alone: no block starts, and the communicator says which row."""
    model = make_model(small(), devices=1)
    rows = next_rows(jnp.zeros(2, jnp.int32), jnp.array([5, model.config.vocab_size]))
    state = model.state(batch=2)
    output = run_layers(model.weights, state, rows, wait_limit=LIMIT)[0]
    assert np.isnan(np.asarray(output)).all()
    with pytest.raises(RuntimeError, match="row 1 of the step has a token"):
        model.weights.communicator.check()


def test_few_multiprocessors(monkeypatch):
    """A draft needs a block for each segment of a row."""
    monkeypatch.setenv("MUSE_SIMULATOR_MULTIPROCESSORS", "7")
    draft = dflash_helpers.make(dflash_helpers.V1)
    shown = dflash_helpers.seen(dflash_helpers.features(1, 1), jnp.array([1]), jnp.array([0]))
    given = draft.start(batch=1, capacity=9), shown, jnp.array([5], jnp.int32), jnp.array([1], jnp.int32)
    with pytest.raises(jax.errors.JaxRuntimeError, match="draft: device 0 has 7 multiprocessors, at least 8"):
        jax.block_until_ready(dflash_helpers.propose(draft, *given)[0].token)
