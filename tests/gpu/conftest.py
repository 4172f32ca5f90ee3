"""GPU tests run on whatever GPUs are there, and are skipped in one line where there is none.

They compare with the CPU, so both platforms must be there: JAX_PLATFORMS=cuda,cpu.
"""

import jax
import numpy as np
import pytest


def _gpus():
    try:
        return jax.devices("gpu")
    except RuntimeError:
        return []


def pytest_collection_modifyitems(config, items):
    if not _gpus():
        for item in items:
            if "tests/gpu" in str(item.path):
                item.add_marker(pytest.mark.skip(reason="no GPU"))


@pytest.fixture(scope="session")
def gpu():
    return _gpus()[0]


@pytest.fixture(scope="session")
def gpus():
    return _gpus()


@pytest.fixture(scope="session")
def on_both(gpu):
    """on_both(function, *operands) -> the function's results on the GPU and on the CPU, as NumPy arrays."""

    def run(device, function, operands):
        with jax.default_device(device):
            results = function(*(jax.device_put(x, device) if isinstance(x, np.ndarray) else x for x in operands))
            assert all(r.devices() == {device} for r in jax.tree.leaves(results))
            return jax.tree.map(np.asarray, results)

    def both(function, *operands):
        return run(gpu, function, operands), run(jax.devices("cpu")[0], function, operands)

    return both
