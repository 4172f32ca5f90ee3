"""Makes muse_jax/recorded.npz, what `muse-jax doctor` compares with: python tests/data/make_recorded.py

Fused sums are tiles of the H200 dumps beside this file; the elementary functions' results are the oracle's.
"""

import sys
from pathlib import Path

import numpy as np

DATA = Path(__file__).parent
sys.path.insert(0, str(DATA.parent))

from op_helpers import random_floats  # noqa: E402
from oracle import elementary, formats  # noqa: E402

COUNT = 192


def oracle(function, *operands):
    """The function's result as the library returns it."""
    functions = {
        "to_bf16": lambda x: formats.R(x).view(np.uint16),
        "from_bf16": lambda x: formats.canonical(formats.widen(x.view(formats.bfloat16))),
        "from_fp16": lambda x: formats.canonical(formats.widen(x.view(np.float16))),
        "to_e4m3": formats.e4m3_sat,
        "from_e4m3": formats.e4m3_decode,
        "to_e2m1": formats.e2m1_rn_sat,
        "from_e2m1": lambda x: formats.e2m1_decode(x & 15),
    }
    return functions.get(function, getattr(elementary, function, None))(*operands)


def operands_of(function):
    if function in ("from_e4m3", "from_e2m1"):
        return [np.arange(256 if function == "from_e4m3" else 16, dtype=np.uint8)]
    if function in ("from_bf16", "from_fp16"):
        edges = [0, 1, 0x7F, 0x80, 0x3FF, 0x400, 0x7BFF, 0x7C00, 0x7C01, 0x7E00, 0x7F7F, 0x7F80, 0x7F81, 0x7FFF]
        drawn = np.random.default_rng(2).integers(0, 1 << 16, COUNT - 2 * len(edges))
        return [np.array([*edges, *(e | 0x8000 for e in edges), *drawn], np.uint16)]
    operands = [random_floats(seed, COUNT) for seed in range(3 if function == "fma" else 1)]
    if function == "fma":  # so that the edges meet each other
        operands = [x[np.random.default_rng(i).permutation(COUNT)] for i, x in enumerate(operands)]
    return [np.abs(x) for x in operands] if function == "to_e4m3" else operands


def tiles(format_name):
    """acc, a, b, result: tiles spread over the random dump, and two of each of the ten kinds of edges."""
    with np.load(DATA / "hopper_mma.npz") as random, np.load(DATA / "hopper_mma_edges.npz") as edges:
        count = len(random[f"{format_name}_a"])
        chosen = random, list(range(0, count, count // 6))[:6]
        aimed = edges, [24 * kind + i for kind in range(10) for i in (0, 13)]
        return {
            key: np.concatenate([dump[f"{format_name}_{letter}"][index] for dump, index in (chosen, aimed)])
            for key, letter in {"0": "c", "1": "a", "2": "b", "result": "d"}.items()
        }


def main():
    from muse_jax.numerics_proof import RECORDED
    from muse_jax.ops.numerics import FUNCTIONS

    arrays = {}
    for function in FUNCTIONS:
        if function.startswith("fsum16"):
            made = tiles(function.removeprefix("fsum16_"))
            for name in ("0", "result"):
                made[name] = made[name].view(np.float32)
        else:
            operands = operands_of(function)
            made = {**{str(i): x for i, x in enumerate(operands)}, "result": oracle(function, *operands)}
        arrays.update({f"{function}.{name}": array for name, array in made.items()})
    np.savez_compressed(RECORDED, **arrays)
    results = sum(arrays[f"{function}.result"].size for function in FUNCTIONS)
    print(f"{RECORDED}: {RECORDED.stat().st_size:,} bytes, {results:,} results")


if __name__ == "__main__":
    main()
