"""A small model's prefill, two steps and a tree on one GPU, for compute-sanitizer; compared with the CPU."""

import gpu_helpers as helpers
import jax
import jax.numpy as jnp
import numpy as np

from muse_jax import decode
from muse_jax.decode import step as step_module

step_module.WAIT_LIMIT["gpu"] = 600.0  # an instrumented kernel may take a hundred times as long
config = helpers.small_config(sliding_window=4)
arrays = helpers.random_arrays(config, 0)
results = []
for devices in (jax.devices("gpu")[:1], jax.devices("cpu")[:1]):
    weights = helpers.placed(config, arrays, devices)
    state = decode.init_state(config, weights.mesh, batch=2, capacity=32)
    output, state = decode.prefill(weights, state, [[1, 2, 3, 4, 5], [6]])
    found = [output]
    for _ in range(2):
        output, state = helpers.single_step(weights, state, output.token)
        found.append(output)
    rows = helpers.random_trees(np.random.default_rng(0), config.vocab_size, np.array([7, 3]), 19)
    values, state = helpers.tapped_step(weights, state, rows, jnp.zeros(2, jnp.int32))
    results.append([*map(np.asarray, jax.tree.leaves((found, values))), *helpers.caches(state)])
    weights.communicator.check()
assert [x.tobytes() for x in results[0]] == [x.tobytes() for x in results[1]]
print(f"same bytes, {sum(x.nbytes for x in results[0]):,} of them")
