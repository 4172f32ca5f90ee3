"""Sampling: options, and the choice of a token as a pure function of a row's logits, its key and its position.

The choice has the same bits on every backend, mesh and batch (docs/numerics.md 10): roundings and exp are the
contract's ops, everything after exp is integer arithmetic.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from muse_jax import ops

UNIT = 28
"""A token's weight is exp(x - max) in units of 2^-28, truncated."""
LOW = 14
"""Sums of weights are kept as two uint32, the low one of 14 bits."""
DRAWS = 64
MAX_LOGPROBS = 20
MAX_VOCAB = 1 << (32 - LOW)  # beyond it a sum of high parts could overflow


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sampling:
    """How tokens are chosen. Applied in this order: logit_bias, temperature, top_k, top_p, min_p.

    Raises:
        ValueError, TypeError: an option out of range, with what was given and what is allowed.
    """

    temperature: float = 1.0
    """0 (greedy) or 0.01 to 100: logits are divided by it."""
    top_k: int | None = None
    """Only the k most probable tokens, ties to the lowest ids."""
    top_p: float | None = None
    """Only the shortest list of the most probable tokens whose probabilities reach p; at 0 the best alone."""
    min_p: float | None = None
    """Only tokens at least so many times as probable as the best one."""
    logit_bias: Mapping[int, float] = dataclasses.field(default_factory=dict)
    """Token id -> what is added to its logit, -10000 to 10000, or -inf, which bans the token."""

    def __post_init__(self):
        """Checks whatever does not depend on the model."""
        temperature = _number("temperature", self.temperature, "0 (greedy) or 0.01 to 100")
        if temperature != 0 and not 0.01 <= temperature <= 100:
            raise ValueError(f"temperature is {self.temperature}, allowed: 0 (greedy) or 0.01 to 100")
        if self.top_k is not None and (not is_whole(self.top_k) or self.top_k < 1):
            raise ValueError(f"top_k is {self.top_k}, allowed: whole numbers from 1 on, or None for all tokens")
        for name in ("top_p", "min_p"):
            value = getattr(self, name)
            if value is not None and not 0 <= _number(name, value, "0 to 1, or None") <= 1:
                raise ValueError(f"{name} is {value}, allowed: 0 to 1, or None to leave it out")
        if not isinstance(self.logit_bias, Mapping):
            given = type(self.logit_bias).__name__
            raise TypeError(
                f"logit_bias is a {given}, expected a dict of token id -> bias, for instance {{5: -math.inf}}"
            )
        for token, bias in self.logit_bias.items():
            allowed = "-10000 to 10000, or -inf to ban the token"
            value = _number(f"logit_bias[{token}]", bias, allowed)
            if not (-10000 <= value <= 10000 or value == -math.inf):
                raise ValueError(f"logit_bias[{token}] is {bias}, allowed: {allowed}")

    @property
    def greedy(self) -> bool:
        """Nothing but the argmax of the logits."""
        return self.temperature == 0 and not self.logit_bias


@dataclasses.dataclass(frozen=True)
class Choice:
    """The options of B sequences as arrays; None where no sequence has the option."""

    keys: jax.Array
    """uint32 [B, 2], threefry2x32."""
    inverse_temperature: jax.Array
    """fp32 [B]; 1 for greedy sequences, whose top_k is 1."""
    top_k: jax.Array | None
    """uint32 [B]."""
    top_p: jax.Array | None
    """fp32 [B]; 1: off."""
    least: jax.Array | None
    """uint32 [B]: the smallest weight that min_p keeps; 0: off."""
    bias: jax.Array | None
    """fp32 [B, V]."""


jax.tree_util.register_dataclass(
    Choice, ["keys", "inverse_temperature", "top_k", "top_p", "least", "bias"], []
)  # fmt: skip


def as_choice(sampling: Sampling | Sequence[Sampling] | None, keys: Any, *, batch: int, vocab: int) -> Choice | None:
    """Options and keys as arrays; None where all is greedy.

    Args:
        sampling: for all sequences, or one per sequence.
        keys: one JAX key per sequence; a single sequence also takes its key as it is. Not without options, of which
            `Sampling(temperature=0)` is greedy and draws nothing.
        batch: sequences.
        vocab: vocabulary size.

    Raises:
        ValueError, TypeError: wrong numbers of options or keys, keys alone, ids beyond the vocabulary, no token left.
    """
    if sampling is None:
        if keys is not None:
            raise ValueError(
                "keys without sampling draw nothing: give sampling=muse_jax.Sampling(...) too, or leave keys out to "
                "decode greedily"
            )
        return None
    options = [sampling] * batch if isinstance(sampling, Sampling) else list(sampling)
    for option in options:
        if not isinstance(option, Sampling):
            raise TypeError(f"sampling holds a {type(option).__name__}, expected muse_jax.Sampling(...)")
    if len(options) != batch:
        raise ValueError(f"got {len(options)} samplings for {batch} prompts; give one for all or one per prompt")
    if vocab >= MAX_VOCAB:
        raise ValueError(f"the vocabulary has {vocab} tokens, sampling allows fewer than {MAX_VOCAB}; decode greedily")
    bias = _bias(options, vocab)
    if all(option.greedy for option in options):
        return None
    if keys is None and any(option.temperature for option in options):
        raise ValueError(
            "sampling needs keys, one per prompt: keys=jax.random.key(0) for one, "
            f"keys=jax.random.split(jax.random.key(0), {batch}) for {batch}"
        )
    top_k = [1 if o.temperature == 0 else vocab if o.top_k is None else min(o.top_k, vocab) for o in options]
    top_p = [1.0 if o.top_p is None else o.top_p for o in options]
    least = [0 if o.min_p is None else math.ceil(o.min_p * 2**UNIT) for o in options]
    inverse = [1 / np.float32(o.temperature or 1) for o in options]
    return Choice(
        keys=jnp.zeros((batch, 2), jnp.uint32) if keys is None else _key_data(keys, batch),
        inverse_temperature=jnp.asarray(inverse, jnp.float32),
        top_k=jnp.asarray(top_k, jnp.uint32) if min(top_k) < vocab else None,
        top_p=jnp.asarray(top_p, jnp.float32) if min(top_p) < 1 else None,
        least=jnp.asarray(least, jnp.uint32) if any(least) else None,
        bias=None if bias is None else jnp.asarray(bias),
    )


def choose(logits: jax.Array, choice: Choice, position: jax.Array, *, unroll: bool = True) -> jax.Array:
    """The token that follows each row.

    Args:
        logits: fp32 [B, V], whole rows on one device. NaN is never chosen; a row without a number gives 0.
        choice: options and keys.
        position: int32 [B], the position that the token will have.
        unroll: write searches out. On GPUs a loop in the loop of steps would be a nested conditional of the CUDA graph;
            elsewhere a loop compiles in a quarter of the time. The bits are the same.

    Returns:
        int32 [B].
    """
    ids = jnp.arange(logits.shape[1], dtype=jnp.uint32)
    x = logits if choice.bias is None else _fma(logits, 1, choice.bias)
    x = _fma(x, choice.inverse_temperature[:, None], 0)
    order = _order(x)
    best = _value(order.max(axis=1))
    exp = ops.numerics("exp", _fma(x, 1, -best[:, None]))
    weight = jnp.where(order > 0, _fma(exp, 2.0**UNIT, 0), 0).astype(jnp.int32).astype(jnp.uint32)

    if (k := choice.top_k) is not None:
        kept = _best(lambda mask: mask.sum(axis=1, dtype=jnp.uint32) >= k, order, ids, unroll)
        weight = jnp.where(kept, weight, 0)
    if (p := choice.top_p) is not None:
        target = _share(p, _sum(weight))
        kept = _best(lambda mask: ~_less(_sum(jnp.where(mask, weight, 0)), target), order, ids, unroll)
        weight = jnp.where(kept | (p == 1)[:, None], weight, 0)
    if choice.least is not None:
        weight = jnp.where(weight >= choice.least[:, None], weight, 0)

    total = _sum(weight)
    drawn = _below(total, choice.keys, position)
    # The last token that has no more than `drawn` before it; one without weight is never the last.
    token = _largest(
        lambda t: (t < len(ids)) & ~_less(drawn, _sum(jnp.where(ids < t[:, None], weight, 0))),
        len(ids),
        logits.shape[0],
        unroll,
    )
    return jnp.where((total[0] | total[1]) == 0, 0, token).astype(jnp.int32)


def log_probs(logits: jax.Array, token: jax.Array, top: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Log-probabilities by `ops.log_prob`, of the model's own distribution (before any option).

    Returns:
        (of the token fp32 [B], the `top` most probable tokens int32 [B, top], ties to the lowest ids; theirs fp32).
    """
    order, ids = _order(logits), jnp.arange(logits.shape[1], dtype=jnp.int32)
    tokens, values = [], []
    for _ in range(top):
        at = jnp.min(jnp.where(order == order.max(axis=1, keepdims=True), ids, len(ids) - 1), axis=1)
        order = jnp.where(ids == at[:, None], 0, order)
        tokens.append(at)
        values.append(ops.log_prob(logits, at))
    empty = (logits.shape[0], 0)
    return (
        ops.log_prob(logits, token),
        jnp.stack(tokens, axis=1) if top else jnp.zeros(empty, jnp.int32),
        jnp.stack(values, axis=1) if top else jnp.zeros(empty, jnp.float32),
    )


# Integers ------------------------------------------------------------------------------------------------------------

Sum = tuple[jax.Array, jax.Array]
"""uint32 [B] high, low: high * 2^LOW + low."""


def _order(x: jax.Array) -> jax.Array:
    """fp32 -> uint32 in the order of the numbers; NaN is 0, below all, and -0 is +0."""
    bits = lax.bitcast_convert_type(x, jnp.uint32)
    sign = jnp.uint32(0x80000000)
    magnitude = bits & ~sign
    ordered = jnp.where((bits & sign != 0) & (magnitude != 0), ~bits, magnitude | sign)
    return jnp.where(magnitude > 0x7F800000, 0, ordered)


def _value(order: jax.Array) -> jax.Array:
    """The inverse of `_order`."""
    sign = jnp.uint32(0x80000000)
    return lax.bitcast_convert_type(jnp.where(order & sign != 0, order ^ sign, ~order), jnp.float32)


def _sum(weight: jax.Array) -> Sum:
    """Rows of weights, exactly."""
    high = (weight >> LOW).sum(axis=1, dtype=jnp.uint32)
    low = (weight & ((1 << LOW) - 1)).sum(axis=1, dtype=jnp.uint32)
    return high + (low >> LOW), low & ((1 << LOW) - 1)


def _less(a: Sum, b: Sum) -> jax.Array:
    return (a[0] < b[0]) | ((a[0] == b[0]) & (a[1] < b[1]))


def _share(p: jax.Array, total: Sum) -> Sum:
    """p of a total, rounded to 24 bits as the contract's fma rounds, at least 1."""
    whole = _fma(total[0].astype(jnp.float32), 2.0**LOW, total[1].astype(jnp.float32))
    part = _fma(whole, p, 0)
    high = _fma(part, 2.0**-LOW, 0).astype(jnp.uint32)
    low = _fma(high.astype(jnp.float32), -(2.0**LOW), part).astype(jnp.uint32)
    return high, jnp.where((high | low) == 0, 1, low)


def _largest(test: Callable[[jax.Array], jax.Array], limit: int, batch: int, unroll: bool) -> jax.Array:
    """uint32 [B]: the largest number below 2^bits(limit) that passes, where 0 does and then ever fewer, bit by bit."""
    bits = limit.bit_length()

    def next_bit(i: jax.Array, found: jax.Array) -> jax.Array:
        larger = found | jnp.uint32(1) << (bits - 1 - i).astype(jnp.uint32)
        return jnp.where(test(larger), larger, found)

    return lax.fori_loop(0, bits, next_bit, jnp.zeros(batch, jnp.uint32), unroll=unroll)


def _best(enough: Callable[[jax.Array], jax.Array], order: jax.Array, ids: jax.Array, unroll: bool) -> jax.Array:
    """bool [B, V]: the shortest list of tokens, best first and of equals the lowest id first, that is enough."""
    batch = order.shape[0]
    least = _largest(lambda t: enough(order >= t[:, None]), 0xFFFFFFFF, batch, unroll)[:, None]
    above, equal = order > least, order == least
    last = _largest(lambda t: ~enough(above | (equal & (ids < t[:, None]))), len(ids), batch, unroll)
    return above | (equal & (ids <= last[:, None]))


def _below(total: Sum, keys: jax.Array, position: jax.Array) -> Sum:
    """Uniform in 0 <= n < total: the first of 64 draws of so many bits that is below it (0 if none is: 2^-64)."""

    def bits(data, at):
        key = jax.random.wrap_key_data(data, impl="threefry2x32")
        return jax.random.bits(jax.random.fold_in(key, at), (DRAWS, 2), jnp.uint32)

    words = jax.vmap(bits)(keys, position)
    mask = total[0]
    for shift in (1, 2, 4, 8, 16):
        mask = mask | (mask >> shift)
    high, low = words[..., 0] & mask[:, None], words[..., 1] & ((1 << LOW) - 1)
    good = _less((high, low), (total[0][:, None], total[1][:, None]))
    first = good & (jnp.cumsum(good, axis=1) == 1)
    return (
        jnp.where(first, high, 0).sum(axis=1, dtype=jnp.uint32),
        jnp.where(first, low, 0).sum(axis=1, dtype=jnp.uint32),
    )


def _fma(a: Any, b: Any, c: Any) -> jax.Array:
    """The contract's fma, whose one rounding no compiler can move."""
    return ops.numerics("fma", *jnp.broadcast_arrays(*(jnp.asarray(v, jnp.float32) for v in (a, b, c))))


# Checks --------------------------------------------------------------------------------------------------------------


def is_whole(value: Any) -> bool:
    """A whole number, Python's or NumPy's, and no bool."""
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def _number(name: str, value: Any, allowed: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float | np.integer | np.floating):
        raise TypeError(f"{name} is {value!r}, a {type(value).__name__}; allowed: {allowed}")
    return float(value)


def _bias(options: Sequence[Sampling], vocab: int) -> np.ndarray | None:
    """fp32 [B, V], or None where there is none."""
    if not any(option.logit_bias for option in options):
        return None
    bias = np.zeros((len(options), vocab), np.float32)
    for row, option in zip(bias, options, strict=True):
        for token, value in option.logit_bias.items():
            if not is_whole(token) or not 0 <= token < vocab:
                raise ValueError(f"logit_bias has {token!r}, which is not a token, allowed: 0 to {vocab - 1}")
            row[token] = value
        if np.isneginf(row).all():
            raise ValueError(f"logit_bias bans all {vocab} tokens; leave at least one")
    return bias


def _key_data(keys: Any, batch: int) -> jax.Array:
    """uint32 [B, 2] of new-style or raw keys."""
    hint = "give one key per prompt, for instance keys=jax.random.split(jax.random.key(0), "
    array = keys if isinstance(keys, jax.Array) else jnp.stack(list(keys)) if isinstance(keys, list | tuple) else None
    if array is None:
        raise TypeError(f"keys is a {type(keys).__name__}, expected JAX keys; {hint}{batch})")
    if jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
        if jax.random.key_impl(array) != "threefry2x32":
            raise ValueError(
                f"keys are of {jax.random.key_impl(array)}, allowed: threefry2x32 (others differ between batches and "
                'backends); make them with jax.random.key(seed, impl="threefry2x32")'
            )
        array = jax.random.key_data(array)
    if array.dtype != jnp.uint32 or array.shape[-1:] != (2,):
        raise TypeError(f"keys is {array.dtype}{list(array.shape)}, expected JAX keys; {hint}{batch})")
    array = array[None] if array.ndim == 1 else array
    if array.shape != (batch, 2):
        raise ValueError(f"got {int(np.prod(array.shape[:-1]))} keys for {batch} prompts; {hint}{batch})")
    return array
