"""One of two processes with one GPU each: `process_script.py I`."""

import sys

import jax

jax.distributed.initialize("localhost:12765", 2, int(sys.argv[1]), local_device_ids=[int(sys.argv[1])])

import numpy as np  # noqa: E402

from muse_jax import MuseSparkConfig, decode, make_mesh  # noqa: E402
from muse_jax.weights import random_params  # noqa: E402
from muse_jax.weights.repack import repack  # noqa: E402

config, mesh = MuseSparkConfig.tiny(), make_mesh(2)
weights = repack(config, random_params(config, 0, mesh), mesh)
state = decode.init_state(config, mesh, capacity=64)
output, state = decode.prefill(weights, state, [[1, 2, 3]])
step = jax.jit(decode.decode_step, donate_argnames=("state",))
tokens = []
for _ in range(20):
    output, state = step(weights, state, output.token)
    tokens.append(int(np.asarray(output.token)[0]))
weights.communicator.check()
print(f"tokens {tokens}")
