"""Shared by the tests of the fused step: small random models, taps by position, caches by position."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from op_helpers import same
from oracle import model as oracle
from oracle import quant

from muse_jax.config import MuseSparkConfig
from muse_jax.decode import (
    DecodeState,
    DecodeWeights,
    Rows,
    StepOutput,
    Taps,
    decode_step,
    init_state,
    next_rows,
    prefill,
    run_step,
)
from muse_jax.decode.state import ring_slots
from muse_jax.mesh import make_mesh
from muse_jax.model import Reference
from muse_jax.weights import parameter_specs, random_params
from muse_jax.weights.repack import repack

SLIDING, FULL = "sliding_attention", "full_attention"
KV = ("k", "v")


def small(**changes) -> MuseSparkConfig:
    """Two layers, one of each kind and format, in the smallest sizes."""
    values = dict(
        vocab_size=64, hidden_size=128, num_hidden_layers=2, num_attention_heads=8, num_key_value_heads=8,
        moe_hidden_size=128, moe_intermediate_size=128, num_local_experts=8, num_experts_per_tok=2, sliding_window=5,
        layer_types=(SLIDING, FULL), layer_rope_theta=(500000.0, 0.0), expert_formats=("nvfp4", "bf16"),
        max_position_embeddings=4096, bos_token_id=1, eos_token_ids=(2,), pad_token_id=None,
    )  # fmt: skip
    return MuseSparkConfig.tiny().replace(**values | changes)


def one_layer(kind: str = FULL, **changes) -> MuseSparkConfig:
    """The smallest model there is."""
    values = dict(
        num_hidden_layers=1, layer_types=(kind,), layer_rope_theta=(500000.0,), expert_formats=("bf16",),
    )  # fmt: skip
    return small(**values | changes)


def drawn(seed: int) -> MuseSparkConfig:
    """A random configuration: every dimension that the fused step has a loop over varies."""
    rng = np.random.default_rng(seed)

    def pick(*values):
        return values[rng.integers(len(values))]

    layers, kv = pick(1, 1, 2, 2, 3, 4), pick(8, 8, 8, 16)
    base, experts = pick(10000.0, 500000.0), pick(8, 16)
    return small(
        vocab_size=8 * int(rng.integers(8, 34)), hidden_size=pick(128, 256), num_hidden_layers=layers,
        num_attention_heads=kv * (int(rng.integers(1, 4)) if kv == 8 else pick(1, 2)), num_key_value_heads=kv,
        moe_hidden_size=pick(128, 256, 384), moe_intermediate_size=pick(128, 256, 384), num_local_experts=experts,
        num_experts_per_tok=int(rng.integers(1, 9)), sliding_window=pick(1, *rng.integers(2, 41, 5).tolist()),
        layer_types=tuple(pick(SLIDING, FULL) for _ in range(layers)),
        layer_rope_theta=tuple(pick(base, base, 0.0) for _ in range(layers)),
        expert_formats=tuple(pick("bf16", "nvfp4") for _ in range(layers)),
        activation_format=pick("bf16", "nvfp4"), routed_scaling_factor=pick(1.0, 2.5),
        qk_scale_factor=float(rng.uniform(0.5, 5.5)), output_multiplier=pick(1.0, 0.1767766952966369),
        residual_gate_temperature=pick(0.3, 1.0), final_logit_softcapping=pick(20.0, 5.0),
    )  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Model:
    """Parameters in both layouts on one mesh."""

    config: MuseSparkConfig
    params: dict[str, jax.Array]
    weights: DecodeWeights
    mesh: Mesh

    def state(self, batch: int = 1, capacity: int = 128) -> DecodeState:
        return init_state(self.config, self.mesh, batch=batch, capacity=capacity)

    def oracle(self, tokens) -> dict[str, np.ndarray]:
        """The NumPy oracle's taps [T, ...] of one sequence."""
        host = {name: np.asarray(a) for name, a in self.params.items()}
        return oracle.forward(self.config, quantised(self.config, host), np.asarray(tokens))

    def reference(self, tokens) -> dict[str, np.ndarray]:
        """The reference's taps [B, T, ...] of equally long sequences."""
        taps = Reference(self.config, self.mesh).taps(self.params, np.asarray(tokens, np.int32))
        return {name: np.asarray(a) for name, a in taps.items()}

    def reference_arrays(self, tokens) -> dict[str, jax.Array]:
        """The same on the devices, as `prefill_whole` wants it."""
        return Reference(self.config, self.mesh).taps(self.params, tokens)

    def changed(self, **arrays: np.ndarray) -> Model:
        """The same model with other parameters (dots in their names written as two underscores)."""
        params = dict(self.params)
        for key, array in arrays.items():
            name = key.replace("__", ".")
            params[name] = jax.device_put(jnp.asarray(array), params[name].sharding)
        return Model(self.config, params, repack(self.config, params, self.mesh), self.mesh)


def make_model(config: MuseSparkConfig, seed: int = 0, devices=8, *, quantized: bool = True) -> Model:
    """Random parameters, packed for so many devices (or for these)."""
    mesh = make_mesh(devices)
    params = random_params(config, seed, mesh, quantized=quantized)
    return Model(config, params, repack(config, params, mesh), mesh)


def random_bits(config, seed: int, mesh) -> dict[str, jax.Array]:
    """Parameters of any bits at all: NaNs with payloads, infinities, subnormals, codes and scales of every value."""
    rng = np.random.default_rng(seed)
    out = {}
    for name, spec in parameter_specs(config).items():
        array = np.frombuffer(rng.bytes(int(np.prod(spec.shape)) * spec.dtype.itemsize), spec.dtype).reshape(spec.shape)
        out[name] = jax.device_put(array, spec.sharding(mesh))
    return out


def quantised(config: MuseSparkConfig, weights: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Masters of NVFP4 layers -> what the oracle reads, by its own quantiser; other parameters as they are."""
    weights = dict(weights)
    for i, kind in enumerate(config.expert_formats):
        for name, halves in (("gate_up_proj", 2), ("down_proj", 1)):
            key = f"layers.{i}.mlp.experts.{name}"
            if kind == "bf16" or weights[key].dtype == np.uint8:
                continue
            experts, rows, columns = weights[key].shape
            parts = [quant.quantise_weights(w) for w in weights[key].reshape(-1, rows // halves, columns)]
            codes, scales, scale_2 = (np.stack(x) for x in zip(*parts, strict=True))
            weights[key] = codes.reshape(experts, rows, columns // 2)
            weights[key + "_weight_scale"] = scales.reshape(experts, rows, columns // 16)
            weights[key + "_weight_scale_2"] = scale_2.reshape((experts, 2) if halves == 2 else (experts,))
    return weights


# Running -------------------------------------------------------------------------------------------------------------


def _tapped(weights: DecodeWeights, state: DecodeState, rows: Rows, commit: bool):
    output, state, taps = run_step(weights, state, rows, taps=True)
    if commit:
        active = rows.sequence[:, None] == jnp.arange(state.batch)[None, :]
        state = dataclasses.replace(state, lengths=state.lengths + active.sum(axis=0, dtype=jnp.int32))
    return output, taps, state


_tapped_jit = jax.jit(_tapped, static_argnames="commit")
_step_jit = jax.jit(decode_step)


def tapped(weights: DecodeWeights, state: DecodeState, rows: Rows, commit: bool = False):
    """One step with taps; the old state stays usable (nothing is donated).

    Returns:
        (the step's values by name, [T, ...] each, state).
    """
    output, taps, state = _tapped_jit(weights, state, rows, commit=commit)
    return named(taps, output), state


def step(weights: DecodeWeights, state: DecodeState, tokens, active=None) -> tuple[StepOutput, DecodeState]:
    """`decode_step`, compiled, without donation."""
    out = _step_jit(weights, state, jnp.asarray(tokens, jnp.int32), None if active is None else jnp.asarray(active))
    jax.block_until_ready(out)
    return out


def named(taps: Taps, output: StepOutput) -> dict[str, np.ndarray]:
    """Taps and output of T rows under the oracle's names, [T, ...] each."""
    residuals, experts, weights = (np.asarray(x) for x in (taps.residuals, taps.experts, taps.weights))
    out = {"logits": np.asarray(output.logits), "token": np.asarray(output.token), "nan": np.asarray(output.nan)}
    for i in range(len(residuals)):
        out[f"layers.{i}.post_attention_residual"] = residuals[i, 0]
        out[f"layers.{i}.post_feedforward_residual"] = residuals[i, 1]
        out[f"layers.{i}.router_experts"] = experts[i]
        out[f"layers.{i}.router_weights"] = weights[i]
    return out


def decode_all(model: Model, sequences, prompt_lengths, chunk: int, capacity: int = 128):
    """Prompts by chunked prefill, the rest of each sequence by steps of one token for all that are not finished.

    Returns:
        (per sequence, values by name [T, ...], state).
    """
    batch, order = len(sequences), []
    parts: list[list[dict]] = [[] for _ in sequences]
    for b, count in enumerate(prompt_lengths):
        order += [b] * count

    def record(count: int, taps: Taps, outputs: Callable[[], StepOutput]) -> None:
        values = named(taps, outputs())
        for row, b in enumerate(order[:count]):
            parts[b].append({name: x[row] for name, x in values.items()})
        del order[:count]

    prompts = [list(map(int, s[:n])) for s, n in zip(sequences, prompt_lengths, strict=True)]
    _, state = prefill(model.weights, model.state(batch, capacity), prompts, chunk=chunk, on_chunk=record)
    while active := [b for b, s in enumerate(sequences) if len(parts[b]) < len(s)]:
        mask = np.isin(np.arange(batch), active)
        tokens = [int(s[len(parts[b])]) if mask[b] else 0 for b, s in enumerate(sequences)]
        rows = next_rows(state.lengths, jnp.asarray(tokens, jnp.int32), jnp.asarray(mask))
        values, state = tapped(model.weights, state, rows, commit=True)
        for b in active:
            parts[b].append({name: x[b] for name, x in values.items()})
    return [{name: np.stack([p[name] for p in part]) for name in part[0]} for part in parts], state


def cached(model: Model, state: DecodeState, sequence: int = 0) -> dict[str, tuple[int, np.ndarray]]:
    """Per layer's k and v: (first position, values [positions, kv heads, 64]) of what a next token may see."""
    length, window = int(state.lengths[sequence]), model.config.sliding_window
    heads = model.config.num_key_value_heads
    index, out = {FULL: 0, SLIDING: 0}, {}
    for i, kind in enumerate(model.config.layer_types):
        first = 0 if kind == FULL else max(0, length - window + 1)
        slots = np.arange(first, length) % (state.capacity if kind == FULL else ring_slots(window))
        for name in KV:
            cache = np.asarray(getattr(state, f"{name}_full" if kind == FULL else f"{name}_ring"))
            own = cache[:, index[kind], sequence][:, :, slots]  # [8, kv/8, positions, 64]
            out[f"layers.{i}.{name}"] = first, own.reshape(heads, len(slots), 64).swapaxes(0, 1)
        index[kind] += 1
    return out


# Comparing -----------------------------------------------------------------------------------------------------------


def assert_values(got: dict, want: dict, rows=slice(None), names=None) -> None:
    """Every value of `got` (but token, nan) has the bytes of `want`'s rows."""
    for name in names or [n for n in got if n not in ("token", "nan")]:
        try:
            same(got[name], want[name][rows])
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from None


def assert_caches(model: Model, state: DecodeState, want: dict, sequence: int = 0) -> None:
    """The cached k and v that a next token may see have the bytes of the taps `want` [T, ...]."""
    for name, (first, values) in cached(model, state, sequence).items():
        try:
            same(values, want[name][first : first + len(values)])
        except AssertionError as error:
            raise AssertionError(f"{name} from position {first}: {error}") from None
