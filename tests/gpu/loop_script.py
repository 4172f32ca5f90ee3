"""Greedy generation on every GPU that fits, compared with the CPU; prints the time per step."""

import time

import gpu_helpers as helpers
import jax

from muse_jax import MuseSparkConfig, generate

gpus = jax.devices("gpu")[:2]
cpu, gpu = helpers.twins(MuseSparkConfig.tiny(), gpus)
prompt, steps = [1, 2, 3], 400
for _ in range(3):  # the first runs operation by operation, the second records the graph
    begin = time.perf_counter()
    found = generate(gpu, prompt, max_new_tokens=steps)
    seconds = time.perf_counter() - begin
assert found == generate(cpu, prompt, max_new_tokens=steps)
print(f"same text, {seconds / steps * 1e6:.0f} us per step on {len(gpus)} x {gpus[0].device_kind}")
