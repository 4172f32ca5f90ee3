"""Random weights that are the same bytes on every machine and in every release.

NumPy guarantees the Philox bit stream; from the bits on only integer sums, IEEE multiplications, square roots and
roundings happen. No libm, no jax.random: both may change their results.
"""

import math
import zlib
from collections.abc import Callable, Iterator

import numpy as np
from jax.sharding import Mesh

from muse_jax.config import MuseSparkConfig
from muse_jax.mesh import check_mesh, make_mesh
from muse_jax.weights.names import FP32, Params, ParamSpec, parameter_specs, place
from muse_jax.weights.quantize import quantize_expert

_CHUNK = 1 << 20
# A 64-bit draw holds four uniform 16-bit integers. Their sum (Irwin-Hall) is close to normal, within +-3.46 sigma.
_MEAN = 2 * 65535
_VARIANCE = (2**32 - 1) / 3
_CLAMPED = 97  # every so many channels of a residual gate get a value at which alpha is clamped


def random_params(config: MuseSparkConfig, seed: int, mesh: Mesh | None = None, *, quantized: bool = False) -> Params:
    """Parameters on which the model is well behaved, yet every branch is taken.

    Gains have a standard deviation of 0.2; residual gates lie around -0.5 with some channels beyond the clamp; router
    logits spread by about 1.6 for the usual output_multiplier and the bias changes the selection; a layer's experts are
    relatives (a common part plus half of an own one), so that one flipped choice is a small change; logits reach the
    soft cap.

    Args:
        seed: 0 to 2**64 - 1. The bits depend on it, the parameter's name and its shape only.
        mesh: where to put the arrays; defaults to `make_mesh()`.
        quantized: layers whose expert format is NVFP4 hold codes and scales instead of bf16 masters. The codes are
            `muse_jax.ops.quantize_weight` of the same masters, gate and up rows separately.

    Returns:
        Parameters as in `parameter_specs`, with its shardings.
    """
    if not 0 <= seed < 2**64:
        raise ValueError(f"seed: given {seed}, allowed: 0 to 2**64 - 1")
    mesh = make_mesh() if mesh is None else check_mesh(mesh)
    final = parameter_specs(config, config.expert_formats if quantized else ("bf16",) * config.num_hidden_layers)
    params: Params = {}
    for name, spec in parameter_specs(config, ("bf16",) * config.num_hidden_layers).items():
        array = _random_array(spec, seed)
        if final.get(name) == spec:
            params[name] = place(spec, array, mesh)
        else:
            for made_name, made in _quantise(name, array, seed).items():
                params[made_name] = place(final[made_name], made, mesh)
    return {name: params[name] for name in final}


def _draws(name: str, seed: int, count: int) -> Iterator[tuple[int, np.ndarray]]:
    """(start, int64 draws): near-normal integers with mean 0 and variance `_VARIANCE`, in chunks."""
    key = np.array([seed, zlib.crc32(name.encode())], dtype=np.uint64)
    bits = np.random.Philox(key=key)
    for start in range(0, count, _CHUNK):
        raw = bits.random_raw(min(_CHUNK, count - start))
        total = np.zeros(raw.shape, np.int64)
        for shift in (0, 16, 32, 48):
            total += ((raw >> np.uint64(shift)) & np.uint64(0xFFFF)).astype(np.int64)
        yield start, total - _MEAN


def _random_array(spec: ParamSpec, seed: int) -> np.ndarray:
    out = np.empty(math.prod(spec.shape), spec.dtype)
    transform = _transform(spec, seed)
    for start, draws in _draws(spec.name, seed, out.size):
        # Always through fp32, so that the rounding to bf16 does not depend on how ml_dtypes reads a double.
        out[start : start + draws.size] = transform(start, draws).astype(FP32).astype(spec.dtype)
    if spec.name.endswith("residual_gate.gate"):
        out[::_CLAMPED] = 3.0
    return out.reshape(spec.shape)


def _transform(spec: ParamSpec, seed: int) -> Callable[[int, np.ndarray], np.ndarray]:
    """(start, integer draws) -> float64 values, by the kind of parameter."""
    name, unit = spec.name, 1.0 / math.sqrt(_VARIANCE)
    if name.endswith((".gate_up_proj", ".down_proj")):  # experts: (common + own / 2) / sqrt(fan in)
        common = np.concatenate([draws for _, draws in _draws(name + ".common", seed, math.prod(spec.shape[1:]))])
        scale = 0.5 * unit / math.sqrt(spec.shape[-1])

        def relatives(start: int, draws: np.ndarray) -> np.ndarray:
            index = np.arange(start, start + draws.size) % common.size
            return (2 * common[index] + draws) * scale

        return relatives
    if name.endswith(("mlp.gate.weight", "e_score_correction_bias")):
        return lambda _, draws: draws * (0.1 * unit)
    if name.endswith("residual_gate.gate"):
        return lambda _, draws: draws * (0.2 * unit) - 0.5
    if name == "norm.weight":  # a plain gain; all others are stored minus one
        return lambda _, draws: draws * (0.2 * unit) + 1.0
    if len(spec.shape) == 1:
        return lambda _, draws: draws * (0.2 * unit)
    if name == "lm_head.weight":
        return lambda _, draws: draws * (0.5 * unit)
    return lambda _, draws: draws * (unit / math.sqrt(spec.shape[-1]))


def _quantise(name: str, masters: np.ndarray, seed: int) -> dict[str, np.ndarray]:
    """bf16 [E, N, K] -> the four NVFP4 arrays of `name`."""
    gate_up = name.endswith(".gate_up_proj")
    made = [quantize_expert(w, gate_up) for w in masters]
    # Activations reach about 10; these scales put their blocks' scales in the middle of e4m3, and differ by expert so
    # that taking the largest matters.
    per_expert = (len(masters), 2) if gate_up else (len(masters),)
    draws = np.concatenate([d for _, d in _draws(name + "_input_scale", seed, math.prod(per_expert))])
    return {
        **{name + suffix: np.stack([expert[suffix] for expert in made]) for suffix in made[0]},
        name + "_input_scale": ((16 + draws % 16) / 2048).astype(FP32).reshape(per_expert),
    }
