"""The expert-parallel reference: the model in one `jax.shard_map`, tokens and experts spread over the devices."""

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.core import Tracer
from jax.sharding import Mesh, PartitionSpec
from jax.typing import ArrayLike

from muse_jax import ops
from muse_jax.config import MuseSparkConfig
from muse_jax.errors import ProblemsError
from muse_jax.mesh import AXIS, RANKS, check_mesh, in_own_mesh, make_mesh
from muse_jax.model.moves import all_tokens
from muse_jax.model.muse_spark import MuseSpark
from muse_jax.profiling import host_phase
from muse_jax.weights.names import check_params, stored_formats

Tokens = ArrayLike | Sequence[Sequence[int]]
"""Ids [B, T] of whole sequences."""

Params = Mapping[str, jax.Array]
"""Parameters by name, see docs/architecture.md."""

_REPLICATED = PartitionSpec()
_BY_EXPERT = PartitionSpec(AXIS)
_BY_TOKEN = PartitionSpec(None, AXIS)


@functools.lru_cache(maxsize=16)
def _structure(config: MuseSparkConfig, packed: tuple[bool, ...]) -> tuple[nnx.GraphDef, nnx.State]:
    """A model without memory: its graph, and its parameters as shapes."""
    return nnx.split(nnx.eval_shape(lambda: MuseSpark(config, packed)))


def build(config: MuseSparkConfig, params: Mapping[str, Any]) -> MuseSpark:
    """A module that holds the given arrays, without copying them.

    Args:
        config: the model.
        params: name -> array (or tracer). The experts' arrays may be one device's share, [E / devices, ...].

    Raises:
        ProblemsError (a ValueError): a parameter is missing or unexpected.
    """
    packed = tuple(stored == "nvfp4" for stored in stored_formats(config, {k: v.dtype for k, v in params.items()}))
    graph, shapes = _structure(config, packed)
    state = nnx.to_flat_state(shapes)
    names = [".".join(map(str, path)) for path, _ in state]
    problems = [f"{name}: missing" for name in names if name not in params]
    problems += [f"{name}: unexpected" for name in sorted(params.keys() - set(names))]
    if problems:
        raise ProblemsError("these parameters do not make the model", problems)
    leaves = [(path, variable.replace(params[name])) for name, (path, variable) in zip(names, state, strict=True)]
    return nnx.merge(graph, nnx.from_flat_state(leaves))


def params_of(module: nnx.Module | nnx.State) -> dict[str, jax.Array]:
    """The arrays of a module, or of some of its state, by name: the inverse of `build`."""
    state = module if isinstance(module, nnx.State) else nnx.state(module)
    return {".".join(map(str, path)): variable[...] for path, variable in nnx.to_flat_state(state)}


class Reference:
    """Muse Spark on whole sequences, token- and expert-parallel over a mesh of 1, 2, 4 or 8 devices.

    The results have the same bits on every mesh and are those of the decoder. All methods are compiled, can be called
    under `jax.jit`, and are differentiable in the floating-point parameters (`jax.grad(..., allow_int=True)` where some
    experts are stored as codes). They take

    - `params`: all parameters by name, on the mesh's devices (experts spread over their leading axis, the rest on every
      device, as `random_params` and the loaders place them) or not on any in particular;
    - `tokens`: integers [B, T], 1 <= T <= max_position_embeddings, each below vocab_size. Under `jax.jit`, where values
      are unknown, a token outside the vocabulary makes its position, and those that see it, NaN.

    and raise ValueError when the arguments do not fit, before anything is computed.
    """

    def __init__(self, config: MuseSparkConfig, mesh: Mesh | None = None):
        """For one model on one mesh (default: `make_mesh()`); compiles on first use, once for all such references."""
        self.config = config
        self.mesh = make_mesh() if mesh is None else check_mesh(mesh)

    @in_own_mesh
    @host_phase("muse_reference")
    def forward(self, params: Params, tokens: Tokens) -> jax.Array:
        """Logits fp32 [B, T, vocab_size]."""
        tokens = self._check(tokens)
        return _run(_logits, self.config, self.mesh, dict(params), tokens, tokens)

    @in_own_mesh
    @host_phase("muse_reference")
    def taps(self, params: Params, tokens: Tokens) -> dict[str, jax.Array]:
        """All intermediate arrays named in docs/architecture.md, [B, T, ...], logits included."""
        tokens = self._check(tokens)
        return _run(_taps, self.config, self.mesh, dict(params), tokens, tokens)

    @in_own_mesh
    @host_phase("muse_reference")
    def log_probs(self, params: Params, tokens: Tokens) -> jax.Array:
        """fp32 [B, T - 1]: the log-probability of each token from the second on, given those before it (T >= 2)."""
        tokens = self._check(tokens, least=2)
        following = jnp.pad(tokens[:, 1:], ((0, 0), (0, 1)))
        return _run(_log_probs, self.config, self.mesh, dict(params), tokens, following)[:, :-1]

    def _check(self, tokens: Tokens, least: int = 1) -> jax.Array:
        """The tokens as int32 [B, T], or ValueError."""
        config = self.config
        if not isinstance(tokens, jax.Array):
            try:
                tokens = np.asarray(tokens)
            except ValueError as error:
                raise ValueError("tokens: given rows of different lengths, expected [batch, length]") from error
            tokens = tokens if tokens.size else tokens.astype(np.int32)  # [] is float64
        if not np.issubdtype(tokens.dtype, np.integer):
            raise ValueError(f"tokens: given {tokens.dtype}, expected integers")
        if tokens.ndim != 2:
            raise ValueError(f"tokens: given shape {tokens.shape}, expected [batch, length]")
        batch, length = tokens.shape
        if batch < 1 or length < least:
            raise ValueError(f"tokens: given shape {tokens.shape}, expected at least [1, {least}]")
        if length > config.max_position_embeddings:
            raise ValueError(
                f"tokens: given sequences of {length}, allowed: at most {config.max_position_embeddings} "
                "(max_position_embeddings)"
            )
        if not isinstance(tokens, Tracer):
            values = np.asarray(tokens)
            outside = np.argwhere((values < 0) | (values >= config.vocab_size))
            if len(outside):
                row, column = outside[0]
                raise ValueError(
                    f"tokens[{row}, {column}]: given {values[row, column]}, allowed: 0 to {config.vocab_size - 1} "
                    f"({len(outside)} such tokens)"
                )
        return jnp.asarray(tokens, jnp.int32)


# Not a method: all references of one configuration and mesh share what is compiled.
@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _run(
    compute: Any, config: MuseSparkConfig, mesh: Mesh, params: Params, tokens: jax.Array, following: jax.Array
) -> Any:
    """`compute(module, tokens, following)` on every device's share; results [B, T, ...] of all tokens."""
    specs, problems = check_params(config, params)
    if problems:
        raise ProblemsError("these parameters do not fit the configuration", problems)
    places = {name: _BY_EXPERT if specs[name].placement == "expert" else _REPLICATED for name in params}
    length = tokens.shape[1]
    padding = -length % RANKS  # padded positions come last: no other position sees them
    tokens, following = (jnp.pad(x, ((0, 0), (0, padding))) for x in (tokens, following))

    def share(params: Params, tokens: jax.Array, following: jax.Array) -> Any:
        result = compute(build(config, params), tokens, following)
        return jax.tree.map(functools.partial(all_tokens, length=length), result) if padding else result

    # check_vma=False: custom calls and their derivatives do not say over which axes they vary. shard_map then adds
    # up the devices' cotangents of every replicated parameter.
    run = jax.shard_map(
        share,
        mesh=mesh,
        in_specs=(places, _BY_TOKEN, _BY_TOKEN),
        out_specs=_REPLICATED if padding else _BY_TOKEN,
        check_vma=False,
    )
    with jax.named_scope("muse_reference"):
        return run(params, tokens, following)


def _logits(module: MuseSpark, tokens: jax.Array, following: jax.Array) -> jax.Array:
    return module(tokens)


def _taps(module: MuseSpark, tokens: jax.Array, following: jax.Array) -> dict[str, jax.Array]:
    taps: dict[str, jax.Array] = {}
    module(tokens, taps)
    return taps


def _log_probs(module: MuseSpark, tokens: jax.Array, following: jax.Array) -> jax.Array:
    return ops.log_prob(module(tokens), following)
