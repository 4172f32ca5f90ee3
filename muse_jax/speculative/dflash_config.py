"""DFlashConfig: every number that defines a DFlash or DFlash2 draft, and the settings of published config.json files.

DFlash: arXiv 2602.06036. DFlash2 adds a convolution in the block around every sublayer and a selector that scores pairs
of candidates. No JAX here, as in `muse_jax.config`.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from muse_jax.config import MuseSparkConfig
from muse_jax.config_checks import is_int, shorten
from muse_jax.errors import ConfigError

MAX_BLOCK = 64
"""Rows of one step of the target, so the most nodes a tree can have."""
MAX_LAYERS = 16
MAX_TOP_K = 32
MAX_HEAD_DIM = 128
"""What the fused call is built for (ffi/draft/plan.h)."""

_POSITIVE = (
    "vocab_size", "hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size",
    "top_k",
)  # fmt: skip
_FLOATS = ("rope_theta", "rms_norm_eps", "output_multiplier", "final_logit_softcapping")


def default_tap_layers(layers: int, count: int) -> tuple[int, ...]:
    """The target's layers (from 0) whose output the draft sees: evenly spaced from layer 1 to layer L - 3.

    Args:
        layers: the target's, L.
        count: how many; with one, it is the middle layer.

    Raises:
        ValueError: so many different layers do not fit.
    """
    taps = (layers // 2,) if count == 1 else tuple(round(1 + k * (layers - 4) / (count - 1)) for k in range(count))
    if count < 1 or layers < 1 or len(set(taps)) != count or list(taps) != sorted(taps):
        raise ValueError(f"count: given {count}, allowed for {layers} layers: 1 to {max(1, layers - 3)}")
    return taps


@dataclasses.dataclass(frozen=True)
class DFlashConfig:
    """Sizes and constants of a draft. Immutable and hashable; lists given for the tuples become tuples.

    Raises:
        ConfigError (a ValueError): one error that lists every field that is wrong, what was given, what is allowed.
    """

    vocab_size: int
    hidden_size: int
    """Shared with the target, as the vocabulary, the embedding table and the LM head are."""
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int
    windows: tuple[int | None, ...]
    """Of each layer: row t sees the context at distances below this; None sees all of it."""
    rope_theta: float
    rms_norm_eps: float
    tap_layers: tuple[int, ...]
    """The target's layers, from 0 and ascending, whose *output* is seen."""
    mask_token_id: int
    output_multiplier: float
    final_logit_softcapping: float
    """Both as the target's own, for the probabilities to be comparable with its."""
    block_width: int = 16
    """Rows of a block: the newest token and what comes after it."""
    top_k: int = 16
    """Candidates for each place after the newest token."""
    selector_rank: int | None = None
    conv_group_size: int | None = None
    """Channels that share a coefficient. This and `selector_rank`: both for DFlash2, neither for DFlash."""

    def __post_init__(self) -> None:
        """Normalises the types and validates all fields together."""
        for name in ("windows", "tap_layers"):
            value = getattr(self, name)
            object.__setattr__(self, name, tuple(value) if isinstance(value, list) else value)
        for name in _FLOATS:
            value = getattr(self, name)
            object.__setattr__(self, name, float(value) if is_int(value) else value)
        problems = _problems(self)
        if problems:
            raise ConfigError("invalid DFlashConfig", problems)

    @property
    def num_layers(self) -> int:
        """The draft's own."""
        return len(self.windows)

    @property
    def is_v2(self) -> bool:
        """DFlash2: with convolutions and the selector."""
        return self.selector_rank is not None

    @property
    def frequencies(self) -> NDArray[np.float32]:
        """fp32 [head_dim / 2]: what a position is multiplied by for the angles of RoPE, as for the target's table."""
        half = self.head_dim // 2
        return np.float32(1) / np.array([self.rope_theta ** (i / half) for i in range(half)], np.float32)

    def slots(self, layer: int, capacity: int) -> int:
        """Context rows that a layer's ring holds: all positions, or its window and two blocks more."""
        window = self.windows[layer]
        return capacity if window is None else min(capacity, window + 2 * self.block_width)

    def replace(self, **changes: Any) -> "DFlashConfig":
        """A copy with some fields changed, validated again."""
        return dataclasses.replace(self, **changes)

    @classmethod
    def from_hf(cls, data: Mapping[str, Any], target: MuseSparkConfig) -> "DFlashConfig":
        """Reads a published config.json, flat (Hugging Face's assistants) or with `dflash_config` (z-lab, SGLang).

        What it leaves open is the target's: vocabulary, output multiplier and softcap; the tapped layers then follow
        `default_tap_layers` with one for each draft layer.

        Raises:
            ConfigError: lists everything that is missing, unsupported, invalid or does not fit the target.
        """
        values, problems = _from_hf(data, target)
        if values is not None:
            try:
                config = cls(**values)
                problems += _misfits(config, data, target)
                if not problems:
                    return config
            except ConfigError as error:
                problems = [*problems, *error.problems]
        raise ConfigError("cannot use this draft's configuration", problems)


def _positive(value: Any) -> bool:
    return is_int(value) and 1 <= value < 2**31


def _problems(c: DFlashConfig) -> list[str]:
    found: list[str] = []

    def require(name: str, fine: bool, allowed: str) -> bool:
        if not fine:
            found.append(f"{name}: given {shorten(getattr(c, name))}, allowed: {allowed}")
        return fine

    sizes = {name: require(name, _positive(getattr(c, name)), "a positive 32-bit integer") for name in _POSITIVE}
    for name in _FLOATS:
        value = getattr(c, name)
        require(name, isinstance(value, float) and 0 < value < math.inf, "a positive finite number")
    for name in ("hidden_size", "intermediate_size"):
        if sizes[name]:
            require(name, getattr(c, name) % 128 == 0, "a multiple of 128")
    if sizes["head_dim"]:
        sizes["head_dim"] = require(
            "head_dim", c.head_dim % 16 == 0 and c.head_dim <= MAX_HEAD_DIM, f"16 to {MAX_HEAD_DIM}, in steps of 16"
        )
    if sizes["num_attention_heads"] and sizes["num_key_value_heads"] and sizes["head_dim"]:
        least = math.lcm(c.num_key_value_heads, 128 // math.gcd(128, c.head_dim))
        require(
            "num_attention_heads", c.num_attention_heads % least == 0,
            f"a multiple of {least}: of num_key_value_heads ({c.num_key_value_heads}), and for all heads' width, "
            f"{c.head_dim} each, to be a multiple of 128",
        )  # fmt: skip
    require(
        "windows", isinstance(c.windows, tuple) and 1 <= len(c.windows) <= MAX_LAYERS
        and all(window is None or _positive(window) for window in c.windows),
        f"for each of 1 to {MAX_LAYERS} layers a positive integer, or None for full attention",
    )  # fmt: skip
    taps = c.tap_layers
    require(
        "tap_layers", isinstance(taps, tuple) and bool(taps) and all(is_int(tap) and tap >= 0 for tap in taps)
        and list(taps) == sorted(set(taps)),
        "one layer at least, counted from 0, ascending",
    )  # fmt: skip
    require("block_width", is_int(c.block_width) and 2 <= c.block_width <= MAX_BLOCK, f"2 to {MAX_BLOCK}")
    if sizes["vocab_size"]:
        last = c.vocab_size - 1
        require("mask_token_id", is_int(c.mask_token_id) and 0 <= c.mask_token_id <= last, f"0 to {last}")
        require("vocab_size", c.vocab_size % 8 == 0, "a multiple of 8")
        if sizes["top_k"]:
            most = min(c.vocab_size, MAX_TOP_K)
            require("top_k", c.top_k <= most, f"1 to {most}, with vocab_size {c.vocab_size}")
    require("selector_rank", c.selector_rank is None or _positive(c.selector_rank), "a positive integer, or None")
    if sizes["hidden_size"]:
        require(
            "conv_group_size",
            c.conv_group_size is None or (_positive(c.conv_group_size) and c.hidden_size % c.conv_group_size == 0),
            f"a divisor of hidden_size ({c.hidden_size}), or None",
        )
    if (c.selector_rank is None) != (c.conv_group_size is None):
        found.append(
            f"selector_rank and conv_group_size: given {c.selector_rank} and {c.conv_group_size}, "
            "allowed: both (DFlash2) or neither (DFlash)"
        )
    return found


_REQUIRED = (
    "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size",
    "rms_norm_eps", "block_size", "mask_token_id",
)  # fmt: skip
# What the forward has no other form of: key -> the values it may have where it is given.
_FIXED: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",), "is_causal": (False,), "attention_bias": (False,), "conv_kernel_size": (2,),
}  # fmt: skip


def _from_hf(data: Mapping[str, Any], target: MuseSparkConfig) -> tuple[dict[str, Any] | None, list[str]]:
    """Field values (None when too little is known) and problems."""
    inner = data.get("dflash_config")
    if inner is not None and not isinstance(inner, Mapping):
        return None, [f"dflash_config: given {shorten(inner)}, expected an object"]
    given = {name: value for name, value in {**data, **(inner or {})}.items() if value is not None}
    problems = [
        f"{name}: given {shorten(given[name])}, allowed: {allowed[0]!r}"
        for name, allowed in _FIXED.items()
        if name in given and given[name] not in allowed
    ]
    rope = given.get("rope_parameters", given.get("rope_scaling", {}))
    rope = rope if isinstance(rope, Mapping) else {"rope_type": rope}
    kind = rope.get("rope_type", rope.get("type", "default"))  # the older name in `rope_scaling`
    if kind != "default":
        problems.append(f"rope_parameters.rope_type: given {shorten(kind)}, allowed: 'default'")
    theta = rope.get("rope_theta", given.get("rope_theta"))
    missing = [name for name in _REQUIRED if name not in given] + ([] if theta is not None else ["rope_theta"])
    problems += [f"{name}: missing" for name in missing]
    layers = given.get("num_hidden_layers")
    if missing:
        return None, problems
    if isinstance(layers, bool) or not isinstance(layers, int) or not 1 <= layers <= 1024:
        return None, [*problems, f"num_hidden_layers: given {shorten(layers)}, allowed: 1 to 1024"]
    windows = _windows(given, layers, problems)
    taps = given.get("target_layer_ids")
    if taps is None:
        try:
            taps = default_tap_layers(target.num_hidden_layers, layers)
        except ValueError as error:
            problems.append(f"target_layer_ids: missing, and there is no default ({error})")
    if windows is None or taps is None:
        return None, problems
    return {
        "vocab_size": given.get("vocab_size", target.vocab_size),
        "windows": windows,
        "rope_theta": theta,
        "tap_layers": taps,
        "block_width": given["block_size"],
        "top_k": given.get("selector_top_k", min(16, target.vocab_size)),
        "output_multiplier": given.get("output_multiplier", target.output_multiplier),
        "final_logit_softcapping": given.get("final_logit_softcapping", target.final_logit_softcapping),
        "selector_rank": given.get("selector_rank"),
        "conv_group_size": given.get("conv_group_size"),
        **{name: given[name] for name in _REQUIRED if name not in ("num_hidden_layers", "block_size")},
    }, problems


def _windows(given: Mapping[str, Any], layers: int, problems: list[str]) -> tuple[int | None, ...] | None:
    """Of each layer; a configuration without `layer_types` has one kind of layer."""
    window = given.get("sliding_window") if given.get("use_sliding_window", True) else None
    kinds = given.get("layer_types", ["full_attention" if window is None else "sliding_attention"] * layers)
    known = ("full_attention", "sliding_attention")
    if not isinstance(kinds, list | tuple) or len(kinds) != layers or any(kind not in known for kind in kinds):
        problems.append(f"layer_types: given {shorten(kinds)}, allowed: {known[0]!r} or {known[1]!r} for each layer")
        return None
    if known[1] in kinds and window is None:
        problems.append("sliding_window: missing or switched off, although layer_types has sliding layers")
        return None
    return tuple(window if kind == known[1] else None for kind in kinds)


def _misfits(c: DFlashConfig, data: Mapping[str, Any], target: MuseSparkConfig) -> list[str]:
    """Where a valid draft is not one of this target."""
    problems = [
        f"{name}: given {ours}, the target has {theirs}"
        for name, ours, theirs in (
            ("vocab_size", c.vocab_size, target.vocab_size),
            ("hidden_size", c.hidden_size, target.hidden_size),
            ("num_target_layers", data.get("num_target_layers"), target.num_hidden_layers),
        )
        if ours is not None and ours != theirs
    ]
    if c.tap_layers[-1] >= target.num_hidden_layers:
        problems.append(
            f"target_layer_ids: given {list(c.tap_layers)}, the target has {target.num_hidden_layers} layers"
        )
    return problems
