"""Small work on one GPU for compute-sanitizer, compared with the CPU: the programs `step`, `tree` or `draft`.

python sanitizer_script.py PROGRAM
"""

import sys

import gpu_helpers as helpers
import jax
import jax.numpy as jnp
import numpy as np
import test_draft

from muse_jax import decode, generate
from muse_jax.decode import step as step_module

# An instrumented kernel may take a hundred times as long; below the test's own limit, so that it says who waits.
step_module.WAIT_LIMIT["gpu"] = 200.0
CONFIG = helpers.small_config(sliding_window=4)
ARRAYS = helpers.random_arrays(CONFIG, 0)


def step(devices, trees: bool = False) -> list:
    """A prefill, then two steps or one tree; every output and the caches."""
    weights = helpers.placed(CONFIG, ARRAYS, devices)
    state = decode.init_state(CONFIG, weights.mesh, batch=2, capacity=32)
    output, state = decode.prefill(weights, state, [[1, 2, 3, 4, 5], [6]])
    found = [output]
    for _ in range(0 if trees else 2):
        output, state = helpers.single_step(weights, state, output.token)
        found.append(output)
    if trees:
        rows = helpers.random_trees(np.random.default_rng(0), CONFIG.vocab_size, np.array([5, 1]), 19)
        values, state = helpers.tapped_step(weights, state, rows, jnp.zeros(2, jnp.int32))
        found.append(values)
    weights.communicator.check()
    return [*map(np.asarray, jax.tree.leaves(found)), *helpers.caches(state)]


def tree(devices) -> list:
    return step(devices, trees=True)


def draft(devices) -> list:
    """Two sequences through a few drafted steps."""
    cpu, model = helpers.twins(test_draft.CONFIG, devices, 5)
    with jax.default_device(jax.devices("cpu")[0]):
        host = test_draft.drafted(cpu)
    placed = test_draft.placed(host, devices)
    text = generate(model, test_draft.PROMPTS, max_new_tokens=5, stop_ids=(), logprobs=1, draft=placed)
    return [np.asarray(x) for x in (text.tokens, text.log_probs)]


program = {"step": step, "tree": tree, "draft": draft}[sys.argv[1]]
gpu, cpu = (program(jax.devices(platform)[:1]) for platform in ("gpu", "cpu"))
assert [x.tobytes() for x in gpu] == [x.tobytes() for x in cpu]
print(f"same bytes, {sum(x.nbytes for x in gpu):,} of them")
