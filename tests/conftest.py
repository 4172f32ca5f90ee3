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

from hypothesis import settings  # noqa: E402

# Shared machines pause: time limits per example would only make tests flaky.
settings.register_profile("muse", deadline=None, max_examples=50)
settings.load_profile("muse")
