"""LanguageModel: one model ready to decode and to be checked. What `muse_jax.load` returns."""

import functools
import os
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.core import Tracer
from jax.sharding import Mesh
from tokenizers import Tokenizer

from muse_jax import decode
from muse_jax.config import MuseSparkConfig
from muse_jax.config_checks import as_path
from muse_jax.decode import DecodeState, DecodeWeights, Prompts, StepOutput, TokenIds
from muse_jax.errors import ProblemsError
from muse_jax.mesh import check_mesh, in_own_mesh, make_mesh, on_gpu, own_mesh
from muse_jax.model.reference import Reference, Tokens, params_of
from muse_jax.profiling import host_phase
from muse_jax.tokenizer import TOKENIZER_FILE, load_tokenizer
from muse_jax.weights import load as load_params
from muse_jax.weights.names import check_params
from muse_jax.weights.packed import load_packed
from muse_jax.weights.refit import check_update, merged, refit
from muse_jax.weights.repack import repack
from muse_jax.weights.transfer import Progress


class LanguageModel:
    """A configuration, parameters in the training layout, and the same weights packed for the fused step."""

    def __init__(
        self,
        config: MuseSparkConfig,
        params: Mapping[str, jax.Array],
        mesh: Mesh | None = None,
        tokenizer: Tokenizer | None = None,
        weights: DecodeWeights | None = None,
    ):
        """Packs the parameters for the mesh, unless packed weights are given.

        Args:
            config: the model.
            params: flat parameters on the mesh (docs/architecture.md, "Parameters").
            mesh: 1, 2, 4 or 8 devices; all that are available by default.
            tokenizer: text <-> ids, optional.
            weights: the same weights as packed by `muse_jax.weights.packed.load_packed`; `params` then need not have
                layers, and without them there is no reference.

        Raises:
            ValueError: parameters that do not fit the configuration (all are listed), or a mesh of another size.
        """
        self.config = config
        self.params = dict(params)
        self.mesh = make_mesh() if mesh is None else check_mesh(mesh)
        self.tokenizer = tokenizer
        with own_mesh(self.mesh):
            self.weights = repack(config, self.params, self.mesh) if weights is None else weights
        self._all_params = any(name.startswith("layers.") for name in self.params)
        self._trainer = Reference(config, self.mesh)
        self._step = jax.jit(decode.decode_step, donate_argnames=("state",))

    @property
    def _reference(self) -> Reference:
        """Raises ValueError: the model has no parameters in the training layout."""
        if not self._all_params:
            raise ValueError(
                "this model was loaded with reference=False and holds the decode layout alone; load it with "
                "reference=True for reference, log_probs, parity and prefill_whole"
            )
        return self._trainer

    @in_own_mesh
    @host_phase("muse_update")
    def update(self, params: "Mapping[str, jax.Array] | nnx.Module | nnx.State[Any, Any]") -> None:
        """New parameters, after a trainer's step say: written into the decode layout in place, on the devices.

        Compiled programs stay as they are. Caches still hold what the old weights made, so start new states. A draft
        keeps the table and head that it was loaded with, which changes its guesses and no text; `load_draft` again
        gives it the new ones.

        Args:
            params: all parameters or any of them, as in `params` (docs/architecture.md, "Refit"). They are not copied
                and not consumed; whoever donates them to the next training step takes them from the reference too.

        Raises:
            ProblemsError (a ValueError): lists unknown names, and other shapes, dtypes or shardings than the model's.
                Nothing has changed then.
        """
        if isinstance(params, nnx.Module | nnx.State):
            params = params_of(params)
        elif not isinstance(params, Mapping):
            raise TypeError(f"params: given a {type(params).__name__}, expected a dict of arrays by name, or nnx state")
        problems = check_update(self.config, self.mesh, params)
        kept = {name for name in params if self._all_params or name in self.params}
        now = merged(self.config, self.params, {name: params[name] for name in kept}) if not problems else {}
        if not problems and self._all_params:
            _, problems = check_params(self.config, now)
        if problems:
            raise ProblemsError("cannot update the model, nothing has changed", problems)
        for weights in refit(self.weights, params):
            self.weights = weights
        self.params = now

    def init_state(self, *, batch: int = 1, capacity: int = 4096) -> DecodeState:
        """Empty caches for `batch` sequences of up to `capacity` tokens (rounded up to a multiple of 16)."""
        return decode.init_state(self.config, self.mesh, batch=batch, capacity=capacity)

    def prefill(
        self, state: DecodeState, prompts: Prompts, *, chunk: int = decode.MAX_ROWS
    ) -> tuple[StepOutput, DecodeState]:
        """Append one prompt per sequence; the old state is consumed.

        Returns:
            (output after each prompt's last token, one row per sequence, state).

        Raises:
            ValueError: ids out of range, capacity exceeded, wrong number of prompts.
        """
        return decode.prefill(self.weights, state, decode.as_prompts(prompts), chunk=chunk)

    @in_own_mesh
    def prefill_whole(self, state: DecodeState, prompts: Prompts) -> tuple[StepOutput, DecodeState]:
        """As `prefill`, through the reference's whole-sequence forward: the same bits. The state must be empty."""
        decode.check_state(self.weights, state)
        taps = functools.partial(self._reference.taps, self.params)
        return decode.prefill_whole(self.config, state, decode.as_prompts(prompts), taps)

    @in_own_mesh
    @host_phase("muse_decode_step")
    def decode_step(
        self, state: DecodeState, tokens: TokenIds, active: jax.Array | None = None
    ) -> tuple[StepOutput, DecodeState]:
        """One token for every sequence; see `muse_jax.decode.decode_step`. The old state is consumed.

        Returns:
            (output with one row per sequence, state).
        """
        decode.check_state(self.weights, state)
        if isinstance(tokens, Tracer) or isinstance(state.epoch, Tracer):
            return decode.decode_step(self.weights, state, tokens, active)
        decode.check_tokens(self.weights, "tokens", tokens)
        tokens = jnp.asarray(tokens, jnp.int32)
        output, state = self._step(self.weights, state, tokens, active)
        if not on_gpu(self.mesh):
            # jaxlib before 0.12 hangs with more than 32 multi-device programs in flight on the CPU.
            jax.block_until_ready(state.epoch)
        return output, state

    def reference(self, token_ids: Tokens) -> jax.Array:
        """Logits fp32 [B, T, V] of whole sequences [B, T] by the expert-parallel reference; differentiable."""
        return self._reference.forward(self.params, token_ids)

    def reference_taps(self, token_ids: Tokens) -> dict[str, jax.Array]:
        """The reference's intermediate arrays by name (docs/architecture.md, "The reference")."""
        return self._reference.taps(self.params, token_ids)

    def log_probs(self, token_ids: Tokens) -> jax.Array:
        """fp32 [B, T-1]: log-probability of every token after the first, by the reference."""
        return self._reference.log_probs(self.params, token_ids)


@host_phase("muse_load")
def load(
    path: "str | os.PathLike[str]",
    *,
    mesh: Mesh | None = None,
    reference: bool = True,
    progress: Progress | None = None,
) -> LanguageModel:
    """Load a checkpoint folder: ours (Orbax) or Hugging Face's (safetensors).

    Args:
        path: the folder, with config.json; its tokenizer.json is used where present.
        mesh: 1, 2, 4 or 8 devices; as many as available by default.
        reference: False packs layer by layer and keeps no parameters in the training layout but those outside the
            layers: half the memory, but `reference`, `log_probs`, `parity` and `prefill_whole` are errors.
        progress: called with (bytes read, bytes in all) now and then.

    Raises:
        CheckpointError: everything that is missing, damaged or of the wrong shape, in one error.
        TypeError: `path` is no path.
    """
    mesh = make_mesh() if mesh is None else check_mesh(mesh)
    folder = as_path("path", path)
    tokenizer = load_tokenizer(folder) if (folder / TOKENIZER_FILE).exists() else None
    weights = None
    with own_mesh(mesh):
        if reference:
            config, params = load_params(folder, mesh, progress=progress)
        else:
            config, params, weights = load_packed(folder, mesh, progress=progress)
    return LanguageModel(config, params, mesh, tokenizer, weights)
