"""The whole text decoder."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax

from muse_jax import ops
from muse_jax.config import MuseSparkConfig
from muse_jax.mesh import AXIS
from muse_jax.model.attention import HEAD
from muse_jax.model.layer import Layer
from muse_jax.model.moves import moved
from muse_jax.model.parts import RMSNorm, Taps, record

_NAN = np.array(0x7FFFFFFF, np.uint32).view(np.float32)


class Embedding(nnx.Module):
    """Table rows by token; weight bf16 [vocabulary, H]."""

    def __init__(self, config: MuseSparkConfig):
        """A table of zeros."""
        self.weight = nnx.Param(jnp.zeros((config.vocab_size, config.hidden_size), jnp.bfloat16))

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """int32 [...] -> bf16 [..., H]; a row of NaNs where the table has no such token."""
        return moved(_rows, self.weight[...], tokens)


def _rows(table: jax.Array, tokens: jax.Array) -> jax.Array:
    # What fills a missing row, NaN for floats and the largest number for unsigned integers, is a NaN either way.
    return table.at[tokens].get(mode="fill", wrap_negative_indices=False)


class Head(nnx.Module):
    """`logit = cap * tanh((gemm(h, weight) * output_multiplier) / cap)`: bf16 [..., H] -> fp32 [..., vocabulary].

    Parameter: weight bf16 [vocabulary, H].
    """

    def __init__(self, config: MuseSparkConfig):
        """A head with weights of zero."""
        self.weight = nnx.Param(jnp.zeros((config.vocab_size, config.hidden_size), jnp.bfloat16))
        self.multiplier = config.output_multiplier
        self.cap = config.final_logit_softcapping

    def __call__(self, h: jax.Array) -> jax.Array:
        """Normalised rows -> logits."""
        return ops.head(h, self.weight[...], multiplier=self.multiplier, cap=self.cap)


class MuseSpark(nnx.Module):
    """Embedding, layers and head of docs/numerics.md section 7, for one device's share of the tokens and experts.

    Attribute paths are the parameters' names. To be called inside a `jax.shard_map` over the mesh axis "rank" (of any
    size; with one device the moves between devices do nothing); `muse_jax.model.Reference` does that.
    """

    def __init__(self, config: MuseSparkConfig, packed: Sequence[bool] | None = None):
        """A model with weights of zero.

        Args:
            config: the model.
            packed: per layer whether its experts are stored as NVFP4 codes (True) or in bf16 (False, the default).
        """
        packed = (False,) * config.num_hidden_layers if packed is None else packed
        self.embed_tokens = Embedding(config)
        self.layers = nnx.List([Layer(config, i, packed[i]) for i in range(config.num_hidden_layers)])
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, round_input=True, centred=False)
        self.lm_head = Head(config)
        self.theta = config.rope_theta
        self.eps = config.rms_norm_eps

    def __call__(self, tokens: jax.Array, taps: Taps | None = None) -> jax.Array:
        """Logits of this device's tokens, which continue those of the devices before it.

        Args:
            tokens: int32 [B, T_local]; device d holds positions d * T_local to (d + 1) * T_local - 1.
            taps: receives the intermediate arrays [B, T_local, ...] named in docs/architecture.md.

        Returns:
            fp32 [B, T_local, vocabulary].
        """
        length = tokens.shape[1]
        start = lax.axis_index(AXIS).astype(jnp.int32) * length
        positions = start + jnp.arange(length, dtype=jnp.int32)
        table = rope_rows(self.theta, start, length)
        # Embedding
        x = ops.rms_norm(self.embed_tokens(tokens), eps=self.eps)
        s = widen(x)
        record(taps, "embedding", s)
        # Layers
        for layer in self.layers:
            s = layer(s, positions, table, taps)
        # Head
        h = self.norm(s)
        logits = self.lm_head(h)
        record(taps, "logits", logits)
        return logits


def rope_rows(theta: float, start: jax.Array, length: int) -> jax.Array:
    """fp32 [length, 64]: cosines and sines of positions start, start + 1, ...; zeros for theta 0 (never used)."""
    if theta == 0:
        return jnp.zeros((length, HEAD), jnp.float32)
    table = ops.rope_table(length * lax.axis_size(AXIS), theta)
    return lax.dynamic_slice_in_dim(jnp.asarray(table), start, length)


def widen(x: jax.Array) -> jax.Array:
    """bf16 -> fp32, exact, a NaN as the contract stores it."""
    return jnp.where(jnp.isnan(x), _NAN, x.astype(jnp.float32))
