"""GPU tests run on whatever GPUs are there (`make test-gpu`) and compare with the CPU: JAX_PLATFORMS=cuda,cpu."""

import jax
import numpy as np
import pytest


@pytest.fixture(scope="session")
def gpu():
    return jax.devices("gpu")[0]


@pytest.fixture(scope="session")
def gpus():
    return jax.devices("gpu")


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
