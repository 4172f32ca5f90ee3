"""GPU tests run on whatever GPUs are there, and are skipped in one line where there is none."""

import jax
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
