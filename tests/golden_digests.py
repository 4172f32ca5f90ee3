"""Golden digests of the tiny model: 64 decode steps after a fixed prompt, every tap.

Run `python tests/golden_digests.py` to rewrite tests/golden/tiny.json after a deliberate change of the contract. A GPU
must print the same digests.
"""

import hashlib
import json
import os
from pathlib import Path

PATH = Path(__file__).parent / "golden" / "tiny.json"
PROMPT = list(b"The same bits everywhere: on one device or eight, chunk by chunk or token by token.")
STEPS, SEED = 64, 0


def compute(devices) -> dict:
    """Digests by tap (sha256 of the little-endian array bytes), the tokens, and what they were made from."""
    from muse_jax import LanguageModel, MuseSparkConfig, make_mesh
    from muse_jax.decoded import decode_text
    from muse_jax.weights import random_params

    config, mesh = MuseSparkConfig.tiny(), make_mesh(devices)  # a number, or the devices
    model = LanguageModel(config, random_params(config, SEED, mesh, quantized=True), mesh)
    decoded = decode_text(model, PROMPT, steps=STEPS)
    return {
        "model": f"MuseSparkConfig.tiny(), random_params(seed={SEED}, quantized=True)",
        "prompt": PROMPT,
        "generated": decoded.tokens[len(PROMPT) :],
        "taps": {name: hashlib.sha256(array.tobytes()).hexdigest() for name, array in sorted(decoded.taps.items())},
    }


if __name__ == "__main__":
    os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
    os.environ.setdefault("PJRT_NPROC", "64")
    PATH.write_text(json.dumps(compute(8), indent=1) + "\n")
    print(f"wrote {PATH}")
