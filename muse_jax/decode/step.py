"""The fused decode step: one custom call over the mesh, for the layers and the head, or one for each."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import PartitionSpec
from jax.typing import ArrayLike

from muse_jax import _native  # noqa: F401  registers the handlers
from muse_jax.config import MuseSparkConfig
from muse_jax.decode import state as state_module
from muse_jax.decode import weights as weights_module
from muse_jax.decode.rows import MAX_ROWS, Rows, next_rows
from muse_jax.decode.state import DecodeState
from muse_jax.decode.weights import RANK, REPLICATED, DecodeWeights
from muse_jax.mesh import AXIS, in_own_mesh, on_gpu

LAYERS_TARGET = "muse_decode_layers_v1"
HEAD_TARGET = "muse_decode_head_v1"

WAIT_LIMIT = {"cpu": 60.0, "gpu": 10.0}
"""Seconds that one rank waits for another before the step ends in an error. Eight CPU devices share few cores, so that
ordinary work can hold one of them up for long."""

GRAPH_OPTIONS: dict[str, bool | int | float | str] = {
    # XLA's defaults and WHILE. The name of the option in XLA_FLAGS takes "+WHILE"; here the whole list is needed.
    "xla_gpu_enable_command_buffer": (
        "FUSION,CUBLAS,CUBLASLT,CUDNN,CUSTOM_CALL,CONDITIONAL,DYNAMIC_SLICE_FUSION,WHILE"
    ),
    "xla_gpu_graph_min_graph_size": 1,
}
"""For `jax.jit(loop, compiler_options=GRAPH_OPTIONS)`: on GPUs every loop of steps in that program, its condition
included, becomes one CUDA graph, so that the host is not asked between steps. Without effect on other backends."""

# Operands of the layers call after the rows and before the weights, and the weights, in the order that
# ffi/bindings/decode.cc reads them.
_CACHES = ("k_full", "v_full", "k_ring", "v_ring")
_WEIGHTS = tuple(n for n in weights_module.SPECS if n not in ("final_gain", "lm_head", "ranks"))

_FULL, _ROPE, _NVFP4 = 1, 2, 4


@dataclasses.dataclass(frozen=True)
class Taps:
    """Intermediate values of the layers that ran, n of them; inactive rows are zeros."""

    residuals: jax.Array
    """fp32 [n, 2, T, H]: the stream after attention and after the MoE."""
    experts: jax.Array
    """int32 [n, T, K]: chosen experts, largest key first."""
    weights: jax.Array
    """fp32 [n, T, K]: their weights."""


jax.tree_util.register_dataclass(Taps, ["residuals", "experts", "weights"], [])


@dataclasses.dataclass(frozen=True)
class StepOutput:
    """What the head says about T rows; inactive rows are zeros, token -1."""

    logits: jax.Array
    """fp32 [T, V], sharded over V."""
    token: jax.Array
    """int32 [T]: the greedy choice; ties go to the lowest id."""
    nan: jax.Array
    """bool [T]: some logit of the row is NaN."""


jax.tree_util.register_dataclass(StepOutput, ["logits", "token", "nan"], [])


@in_own_mesh
def run_layers(
    weights: DecodeWeights,
    state: DecodeState,
    rows: Rows,
    *,
    layers: tuple[int, int] | None = None,
    stream: jax.Array | None = None,
    taps: bool = False,
    wait_limit: float | None = None,
    silent_rank: int | None = None,
) -> tuple[jax.Array, DecodeState, Taps | None]:
    """Embed the rows' tokens and run layers over them in one custom call; their K and V are written to the caches.

    Args:
        weights: packed weights.
        state: caches and committed lengths. Donate it to the enclosing jit, or XLA copies the caches once.
        rows: what to compute; committed lengths do not change.
        layers: half-open range, all by default; a range that does not start at 0 continues from `stream`.
        stream: fp32 [T, H], the residual stream before the first layer of such a range.
        taps: also return intermediate values.
        wait_limit: seconds after which a rank that waits for another gives up and the step ends in an error;
            WAIT_LIMIT by default.
        silent_rank: for tests: this rank takes no part, so that the others must give up.

    Returns:
        (stream fp32 [T, H], state, taps or None).

    Raises:
        ValueError: shapes, dtypes or the range are wrong.
        jax.errors.JaxRuntimeError: values are (tokens, positions, ancestors, capacity): they are checked in the call,
            before anything is written.
    """
    stream, new_state, tapped, _ = _run(
        weights, state, rows, layers, stream, taps=taps, head=False, wait_limit=wait_limit, silent_rank=silent_rank
    )
    return stream, new_state, tapped


@in_own_mesh
def run_step(
    weights: DecodeWeights, state: DecodeState, rows: Rows, *, taps: bool = False, wait_limit: float | None = None
) -> tuple[StepOutput, DecodeState, Taps | None]:
    """All layers and the head over the rows' tokens in one custom call: `run_layers` and `run_head` in one launch.

    Args:
        weights: packed weights.
        state: as in `run_layers`.
        rows: as in `run_layers`.
        taps: as in `run_layers`.
        wait_limit: as in `run_layers`.

    Returns:
        (output of every row, state, taps or None).
    """
    _, new_state, tapped, output = _run(weights, state, rows, None, None, taps=taps, head=True, wait_limit=wait_limit)
    assert output is not None
    return output, new_state, tapped


def _run(
    weights: DecodeWeights,
    state: DecodeState,
    rows: Rows,
    layers: tuple[int, int] | None,
    stream: jax.Array | None,
    *,
    taps: bool,
    head: bool,
    wait_limit: float | None,
    silent_rank: int | None = None,
) -> tuple[jax.Array, DecodeState, Taps | None, StepOutput | None]:
    config, mesh = weights.config, weights.mesh
    begin, end = layers if layers is not None else (0, config.num_hidden_layers)
    _check(config, weights, state, rows, begin, end, stream)
    count = rows.token.shape[0]
    if stream is None:
        stream = jnp.zeros((count, config.hidden_size), jnp.float32)  # not read: layer 0 embeds
    ran, k = end - begin, config.num_experts_per_tok

    shape = jax.ShapeDtypeStruct
    results: list[Any] = [shape((count, config.hidden_size), jnp.float32), shape((2,), jnp.int32)]
    tap_shapes = (
        [shape((ran, 2, count, config.hidden_size), jnp.float32), shape((ran, count, k), jnp.int32),
         shape((ran, count, k), jnp.float32)]
        if taps
        else []
    )  # fmt: skip

    def call(*operands: jax.Array):
        caches, local = operands[9:13], operands[0].shape[0]
        call_results = results + [shape(c.shape, c.dtype) for c in caches] + tap_shapes
        if head:
            call_results += _head_shapes(config, count, local)
        out = jax.ffi.ffi_call(
            LAYERS_TARGET,
            call_results,
            input_output_aliases={8: 1, 9: 2, 10: 3, 11: 4, 12: 5},  # epoch and the four caches
        )(
            *operands,
            dims=_dims(config, begin, end),
            scalars=_scalars(config),
            layer_kinds=_kinds(config),
            taps=np.bool_(taps),
            head=np.bool_(head),
            communicator=np.int64(weights.communicator.open_key()),
            silent_rank=np.int64(-1 if silent_rank is None else silent_rank),
            wait_limit=_wait_limit(weights, wait_limit),
        )
        return (*out[:-3], _columns_last(out[-3]), *out[-2:]) if head else tuple(out)

    operands = {
        "ranks": (weights.ranks, RANK), "token": (rows.token, REPLICATED), "sequence": (rows.sequence, REPLICATED),
        "position": (rows.position, REPLICATED), "ancestors": (rows.ancestors, REPLICATED),
        "lengths": (state.lengths, REPLICATED), "stream": (stream, REPLICATED), "rope": (state.rope, REPLICATED),
        "epoch": (state.epoch, REPLICATED),
        **{name: (getattr(state, name), state_module.SPECS[name]) for name in _CACHES},
        **{name: (getattr(weights, name), weights_module.SPECS[name]) for name in _WEIGHTS},
    }  # fmt: skip
    if head:
        operands |= {"final_gain": (weights.final_gain, REPLICATED), "lm_head": (weights.lm_head, RANK)}
    with jax.named_scope("muse_decode_layers"):
        out = jax.shard_map(
            _refuse_vmap(call),
            mesh=mesh,
            in_specs=tuple(spec for _, spec in operands.values()),
            out_specs=(
                REPLICATED, REPLICATED, RANK, RANK, RANK, RANK, *[REPLICATED] * len(tap_shapes),
                *(_HEAD_SPECS if head else ()),
            ),
            check_vma=False,
        )(*(array for array, _ in operands.values()))  # fmt: skip
    new_state = dataclasses.replace(state, epoch=out[1], **dict(zip(_CACHES, out[2:6], strict=True)))
    tapped = Taps(*out[6:9]) if taps else None
    return out[0], new_state, tapped, StepOutput(*out[-3:]) if head else None


_HEAD_SPECS = (PartitionSpec(None, AXIS), REPLICATED, REPLICATED)


def _head_shapes(config: MuseSparkConfig, rows: int, local: int) -> list[jax.ShapeDtypeStruct]:
    """Logits of each of a device's ranks, greedy tokens, NaN flags."""
    return [
        jax.ShapeDtypeStruct((local, rows, config.vocab_size // 8), jnp.float32),
        jax.ShapeDtypeStruct((rows,), jnp.int32),
        jax.ShapeDtypeStruct((rows,), jnp.bool_),
    ]


def _columns_last(logits: jax.Array) -> jax.Array:
    """[ranks, T, V/8] -> [T, ranks V/8]."""
    return jnp.swapaxes(logits, 0, 1).reshape(logits.shape[1], -1)


@in_own_mesh
def run_head(
    weights: DecodeWeights, state: DecodeState, rows: Rows, stream: jax.Array, *, wait_limit: float | None = None
) -> StepOutput:
    """Final norm, vocabulary projection and argmax in one custom call.

    Args:
        weights: as given to `run_layers`.
        state: what `run_layers` returned.
        rows: as given to `run_layers`.
        stream: fp32 [T, H] after the last layer.
        wait_limit: as in `run_layers`.
    """
    config, mesh = weights.config, weights.mesh
    check_state(weights, state)
    count = rows.token.shape[0]
    if stream.shape != (count, config.hidden_size) or stream.dtype != jnp.float32:
        given = f"{stream.dtype}{list(stream.shape)}"
        raise ValueError(
            f"stream is {given}, expected float32[{count}, {config.hidden_size}]: what run_layers returned"
        )

    def call(ranks, stream, gain, lm_head, sequence, epoch):
        logits, token, nan = jax.ffi.ffi_call(
            HEAD_TARGET,
            _head_shapes(config, count, ranks.shape[0]),
        )(
            ranks, stream, gain, lm_head, sequence, epoch,
            vocab=np.int64(config.vocab_size), eps=np.float32(config.rms_norm_eps),
            multiplier=np.float32(config.output_multiplier), cap=np.float32(config.final_logit_softcapping),
            communicator=np.int64(weights.communicator.open_key()), wait_limit=_wait_limit(weights, wait_limit),
        )  # fmt: skip
        return _columns_last(logits), token, nan

    with jax.named_scope("muse_decode_head"):
        out = jax.shard_map(
            _refuse_vmap(call),
            mesh=mesh,
            in_specs=(RANK, REPLICATED, REPLICATED, RANK, REPLICATED, REPLICATED),
            out_specs=_HEAD_SPECS,
            check_vma=False,
        )(weights.ranks, stream, weights.final_gain, weights.lm_head, rows.sequence, state.epoch)
    return StepOutput(*out)


@in_own_mesh
def decode_step(
    weights: DecodeWeights, state: DecodeState, tokens: ArrayLike | Sequence[int], active: ArrayLike | None = None
) -> tuple[StepOutput, DecodeState]:
    """One new token for every sequence: one custom call.

    Works under jit, scan, while_loop and fori_loop; donate `state`. Batch sequences through `init_state(batch=...)`,
    not through vmap.

    Args:
        weights: packed weights.
        state: the caches; every active sequence's committed length grows by one.
        tokens: int32 [B].
        active: bool [B]; inactive sequences cost nothing and keep their length. All active by default.

    Returns:
        (output with one row per sequence, state).
    """
    check_state(weights, state)
    check_tokens(weights, "tokens", tokens)
    tokens = jnp.asarray(tokens, jnp.int32)
    if tokens.shape != (state.batch,):
        raise ValueError(f"tokens has shape {tokens.shape}, expected ({state.batch},): one token per sequence")
    if active is not None:
        active = jnp.asarray(active)
        if active.shape != (state.batch,) or active.dtype != jnp.bool_:
            raise ValueError(f"active is {active.dtype}{list(active.shape)}, expected bool[{state.batch}]")
    rows = next_rows(state.lengths, tokens, active)
    output, state, _ = run_step(weights, state, rows)
    grown = state.lengths + (1 if active is None else active.astype(jnp.int32))
    return output, dataclasses.replace(state, lengths=grown)


def _wait_limit(weights: DecodeWeights, seconds: float | None) -> np.float32:
    return np.float32(WAIT_LIMIT["gpu" if on_gpu(weights.mesh) else "cpu"] if seconds is None else seconds)


def _refuse_vmap(call):
    """The fused step has its own batch; a vmap over it would silently run steps one after the other."""
    wrapped = jax.custom_batching.custom_vmap(call)

    @wrapped.def_vmap
    def rule(axis_size, in_batched, *operands):
        del axis_size, in_batched, operands
        raise NotImplementedError(
            "the fused decode step cannot be vmapped: give the sequences to one state with init_state(batch=...)"
        )

    return wrapped


def _dims(c: MuseSparkConfig, begin: int, end: int) -> np.ndarray:
    """Attribute `dims`; read_plan in ffi/bindings/decode.cc has the same order."""
    return np.array(
        [c.num_hidden_layers, c.hidden_size, c.num_attention_heads, c.num_key_value_heads, c.moe_hidden_size,
         c.moe_intermediate_size, c.num_local_experts, c.num_experts_per_tok, c.vocab_size, c.sliding_window,
         begin, end, c.activation_format == "nvfp4"],
        np.int64,
    )  # fmt: skip


def _scalars(c: MuseSparkConfig) -> np.ndarray:
    return np.array(
        [
            c.rms_norm_eps,
            c.post_norm_eps,
            c.qk_scale_factor / 8,
            c.output_multiplier,
            c.routed_scaling_factor,
            c.final_logit_softcapping,
        ],
        np.float32,
    )


def _kinds(c: MuseSparkConfig) -> np.ndarray:
    return np.array(
        [
            _FULL * (kind == "full_attention") | _ROPE * (theta != 0) | _NVFP4 * (fmt == "nvfp4")
            for kind, theta, fmt in zip(c.layer_types, c.layer_rope_theta, c.expert_formats, strict=True)
        ],
        np.int32,
    )


def check_state(weights: DecodeWeights, state: DecodeState) -> None:
    """Raise unless the state belongs to the weights' model and mesh and neither has been given away."""
    if not isinstance(state, DecodeState):
        raise TypeError(
            f"state is a {type(state).__name__}, expected the DecodeState of init_state or of the last step"
        )
    if state.config != weights.config or state.mesh != weights.mesh:
        what = "model" if state.config != weights.config else "mesh"
        raise ValueError(
            f"the state was made for another {what} than the weights; make one with init_state of this model"
        )
    if not isinstance(state.epoch, Tracer) and state.epoch.is_deleted():
        raise ValueError("this state was consumed by an earlier step; use the state that the step returned")
    if any(not isinstance(x, Tracer) and x.is_deleted() for x in jax.tree.leaves(weights)):
        raise ValueError("these weights were consumed by LanguageModel.update; use the model's weights of now")


def check_tokens(weights: DecodeWeights, name: str, tokens: Any) -> None:
    """Raise unless tokens are integers and, where their values are known, ids of the vocabulary."""
    array = tokens if isinstance(tokens, jax.Array) else np.asarray(tokens)
    if not np.issubdtype(array.dtype, np.integer):
        raise TypeError(f"{name} has dtype {array.dtype}, expected integers")
    if isinstance(array, Tracer):  # its values are checked inside the call
        return
    if isinstance(array, jax.Array) and any(d.platform != "cpu" for d in array.devices()):
        return  # likewise: reading a GPU's array would wait for the step that makes it
    vocab, values = weights.config.vocab_size, np.asarray(array)
    wrong = values[(values < 0) | (values >= vocab)]
    if wrong.size:
        raise ValueError(f"{name} holds {int(wrong.flat[0])}, allowed: 0 to {vocab - 1} (vocab_size {vocab})")


def _check(c: MuseSparkConfig, weights, state, rows, begin: int, end: int, stream) -> None:
    check_state(weights, state)
    if not isinstance(rows, Rows):
        raise TypeError(
            f"rows is a {type(rows).__name__}, expected Rows: next_rows, chain_rows and tree_rows make them"
        )
    count = rows.token.shape[0]
    if not 1 <= count <= MAX_ROWS:
        raise ValueError(f"a step has {count} rows, allowed: 1 to {MAX_ROWS}; split longer prompts into chunks")
    for name, array, shape, dtype in (
        ("rows.token", rows.token, (count,), jnp.int32),
        ("rows.sequence", rows.sequence, (count,), jnp.int32),
        ("rows.position", rows.position, (count,), jnp.int32),
        ("rows.ancestors", rows.ancestors, (count, count), jnp.bool_),
    ):
        if array.shape != shape or array.dtype != dtype:
            raise ValueError(f"{name} is {array.dtype}{list(array.shape)}, expected {dtype.__name__}{list(shape)}")
    if not 0 <= begin <= end <= c.num_hidden_layers:
        raise ValueError(f"layers is ({begin}, {end}), allowed: 0 <= begin <= end <= {c.num_hidden_layers}")
    if begin and (stream is None or stream.shape != (count, c.hidden_size) or stream.dtype != jnp.float32):
        given = "nothing" if stream is None else f"{stream.dtype}{list(stream.shape)}"
        raise ValueError(f"layers from {begin} on need stream float32[{count}, {c.hidden_size}], got {given}")
