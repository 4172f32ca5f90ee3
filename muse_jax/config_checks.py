"""The rules a configuration must satisfy, each with a message that says how to satisfy it.

Works on plain dicts of field values of any type, so that a wrong type is one more problem and never a crash.
"""

import math
import os
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

LAYER_TYPES = ("full_attention", "sliding_attention")
EXPERT_FORMATS = ("bf16", "nvfp4")
ACTIVATION_FORMATS = ("nvfp4", "bf16")

_INTEGERS = (
    "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim",
    "moe_hidden_size", "moe_intermediate_size", "num_local_experts", "num_experts_per_tok", "sliding_window",
    "max_position_embeddings",
)  # fmt: skip
_FLOATS = (
    "routed_scaling_factor", "rms_norm_eps", "post_norm_eps", "qk_scale_factor", "output_multiplier",
    "final_logit_softcapping", "residual_gate_temperature",
)  # fmt: skip
_TUPLES = ("layer_types", "layer_rope_theta", "eos_token_ids", "expert_formats")

_MAX_INT32 = 2**31 - 1
_LOG_FP32_MAX = 88.7  # exp of more than this is infinite in fp32


def as_path(argument: str, given: Any) -> Path:
    """The path that an argument of that name gives; TypeError for anything else."""
    if not isinstance(given, str | os.PathLike):
        raise TypeError(f"{argument}: given {shorten(given)}, expected a path (a str or os.PathLike)")
    return Path(given)


def _to_float(value: Any) -> Any:
    """An int that a float can hold becomes that float; everything else is returned as it is."""
    if isinstance(value, int) and not isinstance(value, bool):
        try:
            return float(value)
        except OverflowError:
            return value
    return value


def normalise(values: Mapping[str, Any]) -> dict[str, Any]:
    """The fields that have to change type: lists to tuples, integers in float fields to floats."""
    changed: dict[str, Any] = {}
    for name in _FLOATS:
        changed[name] = _to_float(values[name])
    for name in _TUPLES:
        value = values[name]
        changed[name] = tuple(value) if isinstance(value, list) else value
    if isinstance(changed["layer_rope_theta"], tuple):
        changed["layer_rope_theta"] = tuple(_to_float(theta) for theta in changed["layer_rope_theta"])
    return changed


def is_int(value: Any) -> bool:
    """A whole number, and no bool."""
    return isinstance(value, int) and not isinstance(value, bool)


def _as_fp32(value: float) -> float:
    """`value` rounded to fp32; infinite where fp32 cannot hold it."""
    try:
        return struct.unpack("<f", struct.pack("<f", value))[0]
    except OverflowError:
        return math.inf


def shorten(value: Any) -> str:
    """`repr` of a value from outside, cut to a length that a message bears."""
    text = repr(value)
    return text if len(text) <= 120 else text[:117] + "..."


class _Checker:
    """Collects problems. A field that is already wrong takes no part in later checks (`ok`)."""

    def __init__(self, values: Mapping[str, Any]):
        self.values = values
        self.problems: list[str] = []
        self.wrong: set[str] = set()

    def fail(self, name: str, allowed: str, hint: str = "", given: Any = None) -> None:
        shown = given if isinstance(given, str) else shorten(self.values[name] if given is None else given)
        self.problems.append(f"{name}: given {shown}, allowed: {allowed}" + (f"; {hint}" if hint else ""))
        self.wrong.add(name)

    def ok(self, *names: str) -> bool:
        return self.wrong.isdisjoint(names)

    def require(self, name: str, condition: Callable[[Any], bool], allowed: str, hint: str = "") -> None:
        if self.ok(name) and not condition(self.values[name]):
            self.fail(name, allowed, hint)


def find_problems(values: Mapping[str, Any]) -> list[str]:
    """Every reason why `values` (all fields of MuseSparkConfig, normalised) is not a model we can run."""
    check = _Checker(values)
    _check_scalars(check)
    _check_sizes(check)
    _check_ranges(check)
    _check_layers(check)
    _check_tokens(check)
    check.require("activation_format", lambda v: v in ACTIVATION_FORMATS, "'nvfp4' (W4A4) or 'bf16' (W4A16)")
    return check.problems


def _check_scalars(check: _Checker) -> None:
    for name in _INTEGERS:
        value = check.values[name]
        if not is_int(value) or not 1 <= value <= _MAX_INT32:
            check.fail(name, f"an integer from 1 to {_MAX_INT32}")
    for name in _FLOATS:
        value = check.values[name]
        # Constants are used as fp32, where they must neither vanish nor overflow.
        if not isinstance(value, float) or not (0 < _as_fp32(value) < math.inf):
            check.fail(name, "a positive finite number that fp32 can hold")


def _check_sizes(check: _Checker) -> None:
    v = check.values
    for name in ("hidden_size", "moe_hidden_size", "moe_intermediate_size"):
        if check.ok(name) and v[name] % 128:
            check.fail(
                name, "a multiple of 128",
                f"reductions have 8 segments of whole 16-blocks; the next multiple is {-(-v[name] // 128) * 128}",
            )  # fmt: skip
    check.require("head_dim", lambda d: d == 64, "64", "the attention kernels and the numerics are built for 64")
    for name in ("num_key_value_heads", "num_local_experts", "vocab_size"):
        if check.ok(name) and v[name] % 8:
            check.fail(name, "a multiple of 8", f"there are 8 ranks; the next multiple is {-(-v[name] // 8) * 8}")
    if check.ok("num_attention_heads", "num_key_value_heads") and v["num_attention_heads"] % v["num_key_value_heads"]:
        check.fail(
            "num_attention_heads", f"a multiple of num_key_value_heads ({v['num_key_value_heads']})",
            "every key/value head serves the same number of query heads",
        )  # fmt: skip
    if check.ok("num_experts_per_tok"):
        limit = min(v["num_local_experts"], 16) if check.ok("num_local_experts") else 16
        if v["num_experts_per_tok"] > limit:
            check.fail("num_experts_per_tok", f"1 to {limit}", "at most 16, and no more than num_local_experts")


def _check_ranges(check: _Checker) -> None:
    v = check.values
    check.require(
        "max_position_embeddings", lambda n: n <= 2**24, "1 to 16777216", "fp32 cannot count further, and RoPE has to"
    )
    # Attention and the log-probability keep no running maximum (docs/numerics.md), so the largest possible
    # exponential, and the largest possible sum of them, has to fit fp32.
    check.require(
        "qk_scale_factor", lambda q: 8 * q <= 80, "at most 10", "exp of a score (8 * qk_scale_factor) must fit fp32"
    )
    if check.ok("qk_scale_factor", "max_position_embeddings"):
        limit = (_LOG_FP32_MAX - math.log(v["max_position_embeddings"])) / 8
        if v["qk_scale_factor"] > limit:
            check.fail(
                "qk_scale_factor",
                f"at most {limit:.4f} with max_position_embeddings {v['max_position_embeddings']}",
                "a softmax denominator over that many positions must fit fp32; reduce either",
            )
    if check.ok("final_logit_softcapping", "vocab_size"):
        limit = _LOG_FP32_MAX - math.log(v["vocab_size"])
        if v["final_logit_softcapping"] > limit:
            check.fail(
                "final_logit_softcapping", f"at most {limit:.4f} with vocab_size {v['vocab_size']}",
                "the sum of exp(logit) must fit fp32",
            )  # fmt: skip


def _check_layers(check: _Checker) -> None:
    v = check.values

    def per_layer(name: str, good: Callable[[Any], bool], allowed: str) -> None:
        value = v[name]
        if not isinstance(value, tuple):
            check.fail(name, f"a list with one entry per layer, each {allowed}")
            return
        if check.ok("num_hidden_layers") and len(value) != v["num_hidden_layers"]:
            check.fail(
                name, f"one entry per layer: {v['num_hidden_layers']} entries (num_hidden_layers)",
                "change num_hidden_layers or the list", given=f"{len(value)} entries",
            )  # fmt: skip
        bad = {i: entry for i, entry in enumerate(value) if not good(entry)}
        if bad:
            check.fail(name, f"each entry {allowed}", "keys are layer numbers", given=bad)

    per_layer("layer_types", lambda x: x in LAYER_TYPES, " or ".join(map(repr, LAYER_TYPES)))
    per_layer("expert_formats", lambda x: x in EXPERT_FORMATS, " or ".join(map(repr, EXPERT_FORMATS)))
    per_layer(
        "layer_rope_theta",
        lambda x: isinstance(x, float) and (x == 0 or 1 < x <= 1e12),
        "0 (no positions) or a RoPE base above 1 and at most 1e12",
    )
    if check.ok("layer_rope_theta") and len(set(v["layer_rope_theta"]) - {0.0}) > 1:
        check.fail(
            "layer_rope_theta", "0 or one and the same base in all layers",
            "there is one RoPE table", given=sorted(set(v["layer_rope_theta"])),
        )  # fmt: skip


def _check_tokens(check: _Checker) -> None:
    v = check.values
    size = v["vocab_size"] if check.ok("vocab_size") else _MAX_INT32

    def is_token(token: Any) -> bool:
        return is_int(token) and 0 <= token < size

    allowed = f"a token id from 0 to {size - 1} (vocab_size - 1)"
    check.require("bos_token_id", is_token, allowed)
    check.require("pad_token_id", lambda t: t is None or is_token(t), f"None or {allowed}")
    check.require(
        "eos_token_ids", lambda ids: isinstance(ids, tuple) and all(map(is_token, ids)), f"a list, each {allowed}"
    )
