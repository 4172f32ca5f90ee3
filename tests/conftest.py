"""Eight CPU devices for every test, set up before anything imports JAX."""

import os

_FLAG = "--xla_force_host_platform_device_count"
if _FLAG not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_FLAG}=8".strip()
# The devices of one step wait for each other inside custom calls, so XLA's pool must have a thread for each of them
# however few cores there are.
os.environ.setdefault("PJRT_NPROC", "64")
os.environ.setdefault("JAX_PLATFORMS", "cpu")

# They compare a GPU with the CPU, so they want both: `make test-gpu` asks for JAX_PLATFORMS=cuda,cpu.
collect_ignore = [] if "cuda" in os.environ["JAX_PLATFORMS"] else ["gpu"]

import jax  # noqa: E402, F401  (before the environment below, which is for other processes)
import pytest  # noqa: E402
from hypothesis import settings  # noqa: E402

# Shared machines pause: time limits per example would only make tests flaky.
settings.register_profile("muse", deadline=None, max_examples=50)
settings.load_profile("muse")


def pytest_ignore_collect(collection_path, config):
    """Tests of tests/simulator are for the process that has it."""
    return True if collection_path.name == "simulator" and not hasattr(config, "simulated") else None


@pytest.fixture(scope="session", autouse=True)
def shared_programs(tmp_path_factory, worker_id):
    """The processes that tests start on CPUs share what they compile, whichever worker starts them."""
    here = tmp_path_factory.getbasetemp()
    folder = (here if worker_id == "master" else here.parent) / "compiled"
    with pytest.MonkeyPatch.context() as patch:
        if os.environ["JAX_PLATFORMS"] == "cpu":
            patch.setenv("JAX_COMPILATION_CACHE_DIR", str(folder))
            patch.setenv("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.2")
        yield
