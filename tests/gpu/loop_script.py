"""A greedy loop on N GPUs in one lax.while_loop: `loop_script.py N` prints time per step and compares with the CPU."""

import sys
import time

import gpu_helpers as helpers
import jax

from muse_jax import MuseSparkConfig, generate

cpu, gpu = helpers.twins(MuseSparkConfig.tiny(), jax.devices("gpu")[: int(sys.argv[1])])
prompt, steps = [1, 2, 3], 400
generate(gpu, prompt, max_new_tokens=steps)
begin = time.perf_counter()
found = generate(gpu, prompt, max_new_tokens=steps)
seconds = time.perf_counter() - begin
assert found == generate(cpu, prompt, max_new_tokens=steps)
print(f"same text, {seconds / steps * 1e6:.0f} us per step on {sys.argv[1]} x {gpu.mesh.devices.flat[0].device_kind}")
