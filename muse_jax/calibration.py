"""Input scales from sample text: the bf16 model layer by layer, an expert at a time (docs/numerics.md 7 and 8).

The forward pass has the reference's bits; what it keeps are the largest inputs of each expert's two GEMMs.
"""

import functools
import os
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, PartitionSpec

from muse_jax import ops
from muse_jax.config import MuseSparkConfig
from muse_jax.config_checks import as_path
from muse_jax.errors import CheckpointError
from muse_jax.mesh import make_mesh
from muse_jax.model.layer import Layer
from muse_jax.model.muse_spark import rope_rows, widen
from muse_jax.tokenizer import load_tokenizer
from muse_jax.weights.checkpoints import open_source
from muse_jax.weights.hf_names import RowOrder
from muse_jax.weights.names import BF16, FP32, stored_formats
from muse_jax.weights.transfer import Piece, Progress, Source, pieces

SEQUENCE = 1024
"""Tokens of a calibration sequence."""
_STEPS = 6 * 448  # largest e2m1 times largest e4m3: ModelOpt's input_scale is the largest input over this


def calibrate(
    folder: "str | os.PathLike[str]", text: str, *, source_rows: RowOrder | None = None,
    progress: Progress | None = None,
) -> dict[str, np.ndarray]:  # fmt: skip
    """Input scales of every layer's experts on a text, by ModelOpt's formula: largest input / 2688.

    An expert that no token has chosen gets the largest scale of its layer. One device of `jax.devices()` computes, with
    one layer's attention and one expert at a time in memory, and about 100 KB per token at the released sizes.

    Args:
        folder: a checkpoint with bf16 experts in all layers, and a tokenizer.json.
        text: cut into sequences of 1024 tokens.
        source_rows: as in `import_hf`.
        progress: called with (bytes read or passed over, bytes in all).

    Returns:
        `layers.I.mlp.experts.gate_up_proj_input_scale` fp32 [E, 2] (both columns alike) and `.down_proj_input_scale`
        fp32 [E] of every layer.

    Raises:
        CheckpointError: the folder's problems, NVFP4 experts, or activations that are not finite.
        ValueError: a text without tokens, or a tokenizer of another vocabulary.
        TypeError: `folder` is no path.
    """
    headline = f"cannot calibrate {folder}"
    _, source = open_source(as_path("folder", folder), source_rows)
    stored = stored_formats(source.config, {name: spec.dtype for name, spec in source.specs.items()})
    if "nvfp4" in stored:
        hint = "calibrate the bf16 checkpoint that it was made from"
        raise CheckpointError(
            headline,
            [
                f"layers.{i}.mlp.experts: expected bf16, found NVFP4; {hint}"
                for i, f in enumerate(stored)
                if f == "nvfp4"
            ],
        )
    ids = np.array(load_tokenizer(folder).encode(text).ids, np.int32)
    if not ids.size:
        raise ValueError("text: gives no tokens; give some text of the kind that the model is for")
    if ids.max() >= source.config.vocab_size:
        raise ValueError(f"text: token {ids.max()} is outside the vocabulary of {source.config.vocab_size}")
    length = min(SEQUENCE, source.config.max_position_embeddings)
    run = _Calibration(source, [ids[i : i + length] for i in range(0, len(ids), length)], progress)
    scales: dict[str, np.ndarray] = {}
    for layer in range(source.config.num_hidden_layers):
        largest = run.layer(layer)
        if source.problems or not np.isfinite(largest).all():
            wrong = source.problems or [f"layers.{layer}: activations are not finite on this text"]
            raise CheckpointError(headline, wrong)
        seen = np.where(largest < 0, largest.max(axis=1, keepdims=True), largest)
        inputs, hidden = np.where(seen > 0, (seen / FP32.type(_STEPS)).astype(FP32), FP32.type(1))
        prefix = f"layers.{layer}.mlp.experts."
        scales[prefix + "gate_up_proj_input_scale"] = np.stack([inputs, inputs], axis=1)
        scales[prefix + "down_proj_input_scale"] = hidden
    return scales


class _Calibration:
    """Residual streams of the sequences, on their way through the layers."""

    def __init__(self, source: Source, sequences: list[np.ndarray], progress: Progress | None):
        self._source, self._config, self._progress = source, source.config, progress
        unused = ("norm.weight", "lm_head.weight")
        self._total, self._done = sum(spec.nbytes for name, spec in source.specs.items() if name not in unused), 0
        self._mesh = make_mesh(1)
        tokens = np.concatenate(sequences)
        rows = np.empty((len(tokens), self._config.hidden_size), BF16)
        for piece in pieces({"embed_tokens.weight": source.specs["embed_tokens.weight"]}):
            here = (tokens >= piece.start) & (tokens < piece.stop)
            if here.any():
                rows[here] = self._read(piece)[tokens[here] - piece.start]
            else:
                self._pass(piece)
        stream = widen(ops.rms_norm(jnp.asarray(rows), eps=self._config.rms_norm_eps))
        ends = np.cumsum([len(s) for s in sequences])[:-1]
        self.streams = [jnp.asarray(s)[None] for s in np.split(np.asarray(stream), ends)]

    def layer(self, index: int) -> np.ndarray:
        """Takes the streams through a layer; fp32 [2, E]: each expert's largest input and hidden value, -1 without."""
        prefix = f"layers.{index}."
        dense = {
            name.removeprefix(prefix): jnp.asarray(self._read(Piece(name, 0, spec.shape[0])))
            for name, spec in self._source.specs.items()
            if name.startswith(prefix) and spec.placement == "replicated"
        }
        kinds = list(zip(self._config.layer_types, self._config.layer_rope_theta, strict=True))
        enter, leave = _halves(self._config, kinds.index(kinds[index]), self._mesh)
        entered = [enter(dense, s) for s in self.streams]
        e, experts = (np.concatenate([np.asarray(x[i])[0] for x in entered]) for i in (1, 2))
        f, largest = self._experts(prefix + "mlp.experts.", e, experts)
        at = 0
        for i, (s, _, chosen, weights) in enumerate(entered):
            length = s.shape[1]
            self.streams[i] = leave(dense, s, jnp.asarray(f[None, at : at + length]), chosen, weights)
            at += length
        return largest

    def _experts(self, prefix: str, e: np.ndarray, experts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Rows bf16 [T, M] and their experts [T, K] -> results bf16 [T, K, M], largest values as `layer` has them."""
        gate_up, down = prefix + "gate_up_proj", prefix + "down_proj"
        f = np.zeros((*experts.shape, e.shape[1]), BF16)
        largest = np.full((2, self._config.num_local_experts), -1, FP32)
        for expert in range(largest.shape[1]):
            rows, slots = np.nonzero(experts == expert)
            w13, w2 = Piece(gate_up, expert, expert + 1), Piece(down, expert, expert + 1)
            if not len(rows):
                self._pass(w13)
                self._pass(w2)
                continue
            f[rows, slots], *largest[:, expert] = expert_ffn(e[rows], self._read(w13)[0], self._read(w2)[0])
        return f, largest

    def _read(self, piece: Piece) -> np.ndarray:
        rows = self._source.rows(*piece)
        self._pass(piece)
        return rows

    def _pass(self, piece: Piece) -> None:
        spec = self._source.specs[piece.name]
        self._done += spec.nbytes // spec.shape[0] * (piece.stop - piece.start)
        if self._progress is not None:
            self._progress(self._done, self._total)


def expert_ffn(x: np.ndarray, w13: np.ndarray, w2: np.ndarray) -> tuple[np.ndarray, np.float32, np.float32]:
    """Step 4 of the MoE by one bf16 expert: x bf16 [T, M] -> (f bf16 [T, M], max |x|, max |m|)."""
    padded = np.zeros((1 << (len(x) - 1).bit_length(), x.shape[1]), BF16)  # few shapes, so few programs
    padded[: len(x)] = x
    gate, up = jnp.split(ops.gemm(jnp.asarray(padded), jnp.asarray(w13), out_dtype=jnp.float32), 2, axis=1)
    # On the host: XLA's own product might flush subnormals.
    m = (np.asarray(ops.numerics("silu", gate)) * np.asarray(up)).astype(BF16)
    f = np.asarray(ops.gemm(jnp.asarray(m), jnp.asarray(w2)))[: len(x)]
    return f, np.abs(x.astype(FP32)).max(), np.abs(m.astype(FP32)).max()


@functools.lru_cache(maxsize=4)
def _halves(config: MuseSparkConfig, index: int, mesh: Mesh) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """A layer of this kind before its experts and after them, compiled, with the dense parameters as an argument."""
    graph, shapes = nnx.split(nnx.eval_shape(lambda: Layer(config, index, packed=False)))

    def build(dense: Mapping[str, jax.Array]) -> Layer:
        leaves = [
            (path, variable.replace(dense[name]) if (name := ".".join(map(str, path))) in dense else variable)
            for path, variable in nnx.to_flat_state(shapes)
        ]
        return nnx.merge(graph, nnx.from_flat_state(leaves))

    def enter(dense: Mapping[str, jax.Array], s: jax.Array) -> tuple[jax.Array, ...]:
        """Stream fp32 [1, T, H] -> stream after attention, what the experts see, their ids and weights."""
        layer, length = build(dense), s.shape[1]
        start = jnp.zeros((), jnp.int32)
        s = layer.attend(s, jnp.arange(length, dtype=jnp.int32), rope_rows(config.rope_theta, start, length))
        return s, *layer.mlp.route(layer.pre_feedforward_layernorm(s))

    def leave(
        dense: Mapping[str, jax.Array], s: jax.Array, f: jax.Array, experts: jax.Array, weights: jax.Array
    ) -> jax.Array:
        """The experts' results bf16 [1, T, K, M] -> stream after the layer."""
        layer = build(dense)
        return layer.add_moe(s, layer.mlp.post_expert_proj(layer.mlp.experts.combine(f, experts, weights)))

    # The layer's modules expect to be inside a shard_map, of one device here.
    whole = functools.partial(
        jax.shard_map, mesh=mesh, in_specs=PartitionSpec(), out_specs=PartitionSpec(), check_vma=False
    )
    return jax.jit(whole(enter)), jax.jit(whole(leave))
