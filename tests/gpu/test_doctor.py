"""Doctor on real GPUs: every one of them computes the recorded results and the CPU's."""

import numpy as np

from muse_jax import _cuda
from muse_jax.doctor import diagnose


def test_every_gpu_is_bitwise(gpus):
    found = diagnose()
    assert found.problems == []
    for gpu in gpus:
        assert "bitwise: yes (" in found.facts[str(gpu)] and ", 0 differ)" in found.facts[str(gpu)]
    assert "CUDA for sm_" in found.facts["built for"]
    assert found.facts["mesh sizes"].startswith("1: yes")


def test_peer_access(gpus):
    reach = np.array(_cuda.peer_access([d.local_hardware_id for d in gpus]))
    assert reach.shape == (len(gpus), len(gpus)) and reach.dtype == bool and reach.diagonal().all()
