"""Shared by the tests against Hugging Face: the fixture, the checks with their limits, and both of ours run on it."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from muse_jax import ops
from muse_jax.config import MuseSparkConfig
from muse_jax.decode import MAX_ROWS, chain_rows, init_state, prefill, run_head, run_layers
from muse_jax.mesh import AXIS, make_mesh
from muse_jax.model import Reference, build
from muse_jax.model.muse_spark import rope_rows
from muse_jax.weights import import_hf, parameter_specs
from muse_jax.weights.repack import repack

FIXTURE = Path(__file__).parent / "data" / "hf_tiny"
CHUNK = 40
"""Rows of one decode call; 96 are no multiple of it."""
CLAMPED = np.s_[..., ::29]
"""Channels whose residual gates are clamped, see tests/hf/make_fixture.py."""

# rms, relative to that of Hugging Face's values, and largest absolute difference. Measured values behind them; where
# they come from is said in tests/test_hf.py.
LIMITS = {
    "embedding": (2.5e-3, 1.6e-2),  # 1.66e-3, 7.8e-3
    "layer stream": (4.5e-3, 0.10),  # layer 0: 2.90e-3, 4.8e-2; layer 1: 2.64e-3, 4.7e-2
    "head": (4e-3, 0.15),  # 2.33e-3, 7.3e-2
    "end-to-end stream 1": (5.5e-3, 0.10),  # 3.43e-3, 4.6e-2
    "end-to-end stream 2": (6.5e-3, 0.10),  # 4.19e-3, 4.3e-2
    "end-to-end logits": (7.5e-3, 0.35),  # 4.79e-3, 0.161
}
# The same with an absolute rms.
ABSOLUTE_LIMITS = {
    "router logits": (1e-2, 5e-2),  # layer 0: 5.3e-3, 2.0e-2; layer 1: 5.0e-3, 1.8e-2
    "clamped channels": (1.8e-2, 0.10),  # layer 0: 9.6e-3, 4.8e-2; layer 1: 8.6e-3, 4.7e-2
}
CLEAR_GAP = 0.33
"""Twice the largest error of a logit: where the best two are further apart (69 of 96 tokens), the argmax must agree."""


class Mismatch(AssertionError):
    """Not what Hugging Face computed."""


@dataclasses.dataclass(frozen=True)
class LayerResult:
    stream: np.ndarray
    """fp32 [2, 48, H]."""
    experts: np.ndarray
    """int32 [96, K], ascending ids."""
    router: np.ndarray | None = None
    """fp32 [96, E]: router logits, where they can be seen."""


@dataclasses.dataclass(frozen=True)
class EndToEnd:
    """Of 96 tokens, in any shape that ends in these."""

    streams: np.ndarray
    """fp32 [2, ..., H]: after layer 0 and layer 1."""
    experts: np.ndarray
    """int32 [2, ..., K], in any order."""
    logits: np.ndarray
    """fp32 [..., vocabulary]."""
    embedding: np.ndarray | None = None
    """fp32 [..., H], where it can be seen."""


@functools.cache
def hf() -> dict[str, np.ndarray]:
    with np.load(FIXTURE / "oracle.npz") as arrays:
        return dict(arrays)


@functools.cache
def imported(devices: int):
    return import_hf(FIXTURE, make_mesh(devices))


# Checks --------------------------------------------------------------------------------------------------------------


def distance(name: str, ours: np.ndarray, theirs: np.ndarray) -> tuple[float, float]:
    """rms as the limits mean it, and largest difference."""
    difference = ours.reshape(theirs.shape).astype(np.float64) - theirs
    rms = np.sqrt(np.mean(difference**2))
    if name in LIMITS:
        rms /= np.sqrt(np.mean(theirs.astype(np.float64) ** 2))
    return float(rms), float(np.abs(difference).max())


def compare(name: str, ours: np.ndarray, theirs: np.ndarray) -> list[str]:
    """What is wrong: nothing, or one line with the values and the limits."""
    rms, largest = distance(name, ours, theirs)
    most_rms, most = (LIMITS | ABSOLUTE_LIMITS)[name]
    fine = rms <= most_rms and largest <= most  # a NaN is not
    return [] if fine else [f"{name}: rms {rms:.3g} (limit {most_rms}), largest {largest:.3g} (limit {most})"]


def compare_experts(layer: int, ours: np.ndarray) -> list[str]:
    theirs = hf()["fp32/selected"][layer]
    wrong = np.any(np.sort(ours.reshape(theirs.shape)) != theirs, axis=-1).sum()
    return [f"experts of layer {layer}: {wrong} of {len(theirs)} tokens choose others"] if wrong else []


def require(problems: list[str]) -> None:
    if problems:
        raise Mismatch("; ".join(problems))


def check_layer(layer: int, result: LayerResult) -> None:
    theirs = hf()["fp32/hidden"][layer + 1]
    problems = compare("layer stream", result.stream, theirs)
    problems += compare("clamped channels", result.stream[CLAMPED], theirs[CLAMPED])
    problems += compare_experts(layer, result.experts)
    if result.router is not None:
        problems += compare("router logits", result.router, hf()["fp32/router"][layer])
    require(problems)


def check_end_to_end(result: EndToEnd) -> None:
    theirs = hf()["fp32/logits"]
    problems = [] if result.embedding is None else compare("embedding", result.embedding, hf()["fp32/hidden"][0])
    for layer in range(2):
        problems += compare(f"end-to-end stream {layer + 1}", result.streams[layer], hf()["fp32/hidden"][layer + 1])
        problems += compare_experts(layer, result.experts[layer])
    problems += compare("end-to-end logits", result.logits, theirs)
    best = np.sort(theirs)[..., -2:]
    clear = best[..., 1] - best[..., 0] > CLEAR_GAP
    wrong = np.argmax(result.logits.reshape(theirs.shape), -1)[clear] != np.argmax(theirs, -1)[clear]
    problems += [f"argmax: {wrong.sum()} of {clear.sum()} tokens"] if wrong.any() else []
    require(problems)


# Ours ----------------------------------------------------------------------------------------------------------------


def on_mesh(config: MuseSparkConfig, params, devices: int, compute: Callable, stream: np.ndarray):
    """`compute(module, stream, positions, table)` on every device's share of the stream [2, 48, H]."""
    mesh = make_mesh(devices)

    def share(params, s):
        length = s.shape[1]
        start = jax.lax.axis_index(AXIS).astype(jnp.int32) * length
        positions = start + jnp.arange(length, dtype=jnp.int32)
        return compute(build(config, params), s, positions, rope_rows(config.rope_theta, start, length))

    by_token = PartitionSpec(None, AXIS)
    places = {name: spec.sharding(mesh).spec for name, spec in parameter_specs(config).items()}
    run = jax.shard_map(share, mesh=mesh, in_specs=(places, by_token), out_specs=by_token, check_vma=False)
    return jax.tree.map(np.asarray, jax.jit(run)(dict(params), jnp.asarray(stream)))


def reference_layer(config: MuseSparkConfig, params, devices: int, layer: int) -> LayerResult:
    """The reference's layer, from Hugging Face's stream before it."""

    def compute(module, s, positions, table):
        module, taps = module.layers[layer], {}
        out = module(s, positions, table, taps)
        router = module.mlp.gate
        _, _, logits = ops.router(
            module.pre_feedforward_layernorm(taps[f"layers.{layer}.post_attention_residual"]),
            router.weight[...],
            router.e_score_correction_bias[...],
            experts_per_token=router.experts_per_token,
            multiplier=router.multiplier,
            scaling=router.scaling,
        )
        return out, taps[f"layers.{layer}.router_experts"], logits

    stream, experts, logits = on_mesh(config, params, devices, compute, hf()["fp32/hidden"][layer])
    return LayerResult(stream, np.sort(experts.reshape(-1, experts.shape[-1])), logits)


def fused_layer(config: MuseSparkConfig, params, devices: int, layer: int) -> LayerResult:
    """The decode call's layer, from Hugging Face's stream before it, in chunks that reach over both sequences.

    The call's first layer embeds tokens instead of taking a stream, so layer 0 takes the second place, and layer 1 the
    first, where it does not run.
    """
    if layer == 0:
        config = config.replace(layer_types=config.layer_types[::-1], layer_rope_theta=config.layer_rope_theta[::-1])
        swap = {"layers.0.": "layers.1.", "layers.1.": "layers.0."}
        params = {swap.get(name[:9], name[:9]) + name[9:]: w for name, w in params.items()}
    before = hf()["fp32/hidden"][layer]
    batch, length, hidden = before.shape
    mesh = make_mesh(devices)
    weights, state = repack(config, params, mesh), init_state(config, mesh, batch=batch, capacity=length)
    run = jax.jit(functools.partial(run_layers, layers=(1, 2), taps=True), donate_argnames="state")
    sequences, positions = (x.reshape(-1) for x in np.indices((batch, length)))
    streams, experts = [], []
    for begin in range(0, batch * length, CHUNK):
        part = slice(begin, begin + CHUNK)
        count = len(sequences[part])
        rows = chain_rows([0] * count, sequences[part], positions[part], CHUNK)
        chunk = np.zeros((CHUNK, hidden), np.float32)
        chunk[:count] = before.reshape(-1, hidden)[part]
        out, state, taps = run(weights, state, rows, stream=jnp.asarray(chunk))
        state = dataclasses.replace(state, lengths=state.lengths.at[sequences[part]].add(1))
        streams.append(np.asarray(out)[:count])
        experts.append(np.asarray(taps.experts)[0, :count])
    return LayerResult(np.concatenate(streams).reshape(before.shape), np.sort(np.concatenate(experts)))


def reference_head(config: MuseSparkConfig, params, devices: int) -> np.ndarray:
    """Logits from Hugging Face's last stream."""
    last = hf()["fp32/hidden"][-1]
    return on_mesh(config, params, devices, lambda m, s, positions, table: m.lm_head(m.norm(s)), last)


def fused_head(config: MuseSparkConfig, params, devices: int) -> np.ndarray:
    """Logits from Hugging Face's last stream, one sequence after the other."""
    mesh = make_mesh(devices)
    weights, state = repack(config, params, mesh), init_state(config, mesh, capacity=48)
    rows = chain_rows([0] * 48, [0] * 48, range(48), 48)
    run = jax.jit(run_head)
    return np.stack([run(weights, state, rows, jnp.asarray(s)).logits for s in hf()["fp32/hidden"][-1]])


def reference_end_to_end(config: MuseSparkConfig, params, devices: int) -> EndToEnd:
    taps = Reference(config, make_mesh(devices)).taps(params, hf()["input_ids"])
    streams = np.stack([taps[f"layers.{i}.post_feedforward_residual"] for i in range(2)])
    experts = np.stack([taps[f"layers.{i}.router_experts"] for i in range(2)])
    return EndToEnd(streams, experts, np.asarray(taps["logits"]), np.asarray(taps["embedding"]))


def fused_end_to_end(config: MuseSparkConfig, params, devices: int) -> EndToEnd:
    mesh = make_mesh(devices)
    weights, state = repack(config, params, mesh), init_state(config, mesh, batch=2, capacity=48)
    chunks = []

    def keep(count, taps, outputs):
        arrays = taps.residuals[:, 1, :count], taps.experts[:, :count], outputs().logits[None, :count]
        chunks.append([np.asarray(x) for x in arrays])

    prefill(weights, state, hf()["input_ids"].tolist(), chunk=MAX_ROWS, on_chunk=keep)
    streams, experts, logits = (np.concatenate(parts, axis=1) for parts in zip(*chunks, strict=True))
    return EndToEnd(streams, experts, logits[0])


LAYER: dict[str, Callable[..., LayerResult]] = {"reference": reference_layer, "fused": fused_layer}
HEAD: dict[str, Callable[..., np.ndarray]] = {"reference": reference_head, "fused": fused_head}
END_TO_END: dict[str, Callable[..., EndToEnd]] = {"reference": reference_end_to_end, "fused": fused_end_to_end}
