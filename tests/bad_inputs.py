"""What people get wrong, one row each: the call, the error, and what it has to say. Run by test_bad_input.py.

Calls get a world `w` (test_bad_input.World) with a small model. A message is found literally; " ... " in it stands for
anything.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from muse_jax import (
    MuseSparkConfig,
    Sampling,
    generate,
    guarantee,
    inspect_checkpoint,
    make_mesh,
    parity,
    random_draft,
    stream,
)
from muse_jax.decode import (
    decode_step,
    init_state,
    next_rows,
    prefill,
    prefill_whole,
    run_head,
    run_layers,
    tree_rows,
)
from muse_jax.errors import ConfigError
from muse_jax.mesh import check_mesh
from muse_jax.sampling import as_choice
from muse_jax.speculative import DFlashConfig

NAN, INF = math.nan, math.inf
TINY = MuseSparkConfig.tiny()


@dataclasses.dataclass(frozen=True)
class Row:
    """One mistake."""

    name: str
    ask: Callable[..., Any]
    """World, folder -> raises."""
    says: tuple[str, ...]
    error: type[Exception] = ValueError
    prepare: Callable[..., Any] | None = None
    """World, folder, monkeypatch: makes what is wrong."""


def rows(topic: str, ask: Callable[..., Any], cases: list[tuple], error: type[Exception] = ValueError) -> list[Row]:
    """A row for each (arguments of `ask` after the world, what is said[, another error])."""
    return [
        Row(f"{topic}-{i}", lambda w, _, given=given: ask(w, *given), (says,), *(other or (error,)))
        for i, (*given, says, other) in enumerate(
            (*case[:-1], case[-1], ()) if isinstance(case[-1], str) else (*case[:-2], case[-2], case[-1:])
            for case in cases
        )
    ]


# Configurations ------------------------------------------------------------------------------------------------------

SEGMENTS = "reductions have 8 segments of whole 16-blocks; the next multiple is"
CONFIG_FIELDS = [
    ("hidden_size", 200, f"hidden_size: given 200, allowed: a multiple of 128; {SEGMENTS} 256"),
    ("moe_hidden_size", 64, f"moe_hidden_size: given 64, allowed: a multiple of 128; {SEGMENTS} 128"),
    ("moe_intermediate_size", 129, f"moe_intermediate_size: given 129, allowed: a multiple of 128; {SEGMENTS} 256"),
    ("head_dim", 128, "head_dim: given 128, allowed: 64; the attention kernels and the numerics are built for 64"),
    (
        "num_key_value_heads",
        2,
        "num_key_value_heads: given 2, allowed: a multiple of 8; there are 8 ranks; the next multiple is 8",
    ),
    (
        "num_local_experts",
        20,
        "num_local_experts: given 20, allowed: a multiple of 8; there are 8 ranks; the next multiple is 24",
    ),
    ("vocab_size", 390, "vocab_size: given 390, allowed: a multiple of 8; there are 8 ranks; the next multiple is 392"),
    (
        "num_attention_heads",
        12,
        "num_attention_heads: given 12, allowed: a multiple of num_key_value_heads (8); "
        "every key/value head serves the same number of query heads",
    ),
    (
        "num_experts_per_tok",
        17,
        "num_experts_per_tok: given 17, allowed: 1 to 16; at most 16, and no more than num_local_experts",
    ),
    ("num_experts_per_tok", 0, "num_experts_per_tok: given 0, allowed: an integer from 1 to 2147483647"),
    ("sliding_window", 0, "sliding_window: given 0, allowed: an integer from 1 to 2147483647"),
    ("hidden_size", "256", "hidden_size: given '256', allowed: an integer from 1 to 2147483647"),
    ("hidden_size", True, "hidden_size: given True, allowed: an integer from 1 to 2147483647"),
    ("hidden_size", 256.0, "hidden_size: given 256.0, allowed: an integer from 1 to 2147483647"),
    ("rms_norm_eps", 0, "rms_norm_eps: given 0.0, allowed: a positive finite number that fp32 can hold"),
    ("post_norm_eps", 1e-60, "post_norm_eps: given 1e-60, allowed: a positive finite number that fp32 can hold"),
    (
        "output_multiplier",
        float("nan"),
        "output_multiplier: given nan, allowed: a positive finite number that fp32 can hold",
    ),
    (
        "residual_gate_temperature",
        1e39,
        "residual_gate_temperature: given 1e+39, allowed: a positive finite number that fp32 can hold",
    ),
    (
        "routed_scaling_factor",
        None,
        "routed_scaling_factor: given None, allowed: a positive finite number that fp32 can hold",
    ),
    (
        "qk_scale_factor",
        10.5,
        "qk_scale_factor: given 10.5, allowed: at most 10; exp of a score (8 * qk_scale_factor) must fit fp32",
    ),
    (
        "final_logit_softcapping",
        85,
        "final_logit_softcapping: given 85.0, allowed: at most 82.7494 with vocab_size 384; "
        "the sum of exp(logit) must fit fp32",
    ),
    (
        "max_position_embeddings",
        2**24 + 1,
        "max_position_embeddings: given 16777217, allowed: 1 to 16777216; fp32 cannot count further, and RoPE has to",
    ),
    (
        "layer_types",
        ["full_attention"] * 5,
        "layer_types: given 5 entries, allowed: one entry per layer: 6 entries (num_hidden_layers); "
        "change num_hidden_layers or the list",
    ),
    (
        "layer_types",
        ["full_attention"] * 5 + ["chunked"],
        "layer_types: given {5: 'chunked'}, allowed: each entry 'full_attention' or 'sliding_attention'; "
        "keys are layer numbers",
    ),
    (
        "layer_types",
        "full_attention",
        "layer_types: given 'full_attention', allowed: a list with one entry per layer, each 'full_attention' or "
        "'sliding_attention'",
    ),
    (
        "layer_rope_theta",
        [0, 10000, 500000, 0, 0, 0],
        "layer_rope_theta: given [0.0, 10000.0, 500000.0], allowed: 0 or one and the same base in all layers; "
        "there is one RoPE table",
    ),
    (
        "layer_rope_theta",
        [-1, 0, 0, 0, 0, 0],
        "layer_rope_theta: given {0: -1.0}, allowed: each entry 0 (no positions) or a RoPE base above 1 and at most "
        "1e12; keys are layer numbers",
    ),
    (
        "expert_formats",
        ["int4"] + ["bf16"] * 5,
        "expert_formats: given {0: 'int4'}, allowed: each entry 'bf16' or 'nvfp4'; keys are layer numbers",
    ),
    ("activation_format", "fp8", "activation_format: given 'fp8', allowed: 'nvfp4' (W4A4) or 'bf16' (W4A16)"),
    ("bos_token_id", 384, "bos_token_id: given 384, allowed: a token id from 0 to 383 (vocab_size - 1)"),
    ("pad_token_id", -1, "pad_token_id: given -1, allowed: None or a token id from 0 to 383 (vocab_size - 1)"),
    ("eos_token_ids", 257, "eos_token_ids: given 257, allowed: a list, each a token id from 0 to 383 (vocab_size - 1)"),
]

CONFIG = rows("config", lambda w, name, value: TINY.replace(**{name: value}), CONFIG_FIELDS, ConfigError)


def draft_settings(change: dict) -> dict:
    """A draft's config.json for the world's model, with a change."""
    return {
        "block_size": 8, "mask_token_id": 63, "head_dim": 16, "hidden_size": 128, "intermediate_size": 128,
        "layer_types": ["sliding_attention", "full_attention"], "num_attention_heads": 8, "num_key_value_heads": 2,
        "num_hidden_layers": 2, "rms_norm_eps": 1e-5, "sliding_window": 12, "vocab_size": 64,
        "rope_parameters": {"rope_theta": 1e4, "rope_type": "default"}, "dflash_config": {"target_layer_ids": [0, 1]},
        **change,
    }  # fmt: skip


DRAFT_CONFIG = rows(
    "draft-config",
    lambda w, change: DFlashConfig.from_hf(draft_settings(change), w.model.config),
    [
        ({"is_causal": True}, "is_causal: given True, allowed: False"),
        ({"hidden_act": "gelu"}, "hidden_act: given 'gelu', allowed: 'silu'"),
        (
            {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1.0}},
            "rope_type: given 'yarn', allowed: 'default'",
        ),
        ({"rope_parameters": None}, "rope_theta: missing"),
        (
            {"rope_parameters": None, "rope_theta": 1e4, "rope_scaling": {"type": "linear"}},
            "rope_type: given 'linear', allowed: 'default'",
        ),
        ({"num_hidden_layers": "2"}, "num_hidden_layers: given '2', allowed: 1 to 1024"),
        ({"layer_types": ["chunked"] * 2}, "layer_types: given ['chunked', 'chunked'], allowed: "),
        ({"sliding_window": None}, "sliding_window: missing or switched off"),
        ({"vocab_size": 128}, "vocab_size: given 128, the target has 64"),
        ({"hidden_size": 256}, "hidden_size: given 256, the target has 128"),
        ({"num_target_layers": 4}, "num_target_layers: given 4, the target has 2"),
        ({"dflash_config": 3}, "dflash_config: given 3, expected an object"),
        ({"block_size": None}, "block_size: missing"),
        ({"dflash_config": {}}, "target_layer_ids: missing, and there is no default"),
        ({"dflash_config": {"target_layer_ids": [1, 3]}}, "target_layer_ids: given [1, 3], the target has 2 layers"),
    ],
    ConfigError,
)

DRAFTS = rows(
    "draft",
    lambda w, change, width: random_draft(
        dataclasses.replace(w.draft_config, **change), jax.random.key(0), *w.shared, width=width
    ),
    [
        ({}, 9, "width: given 9, allowed: 1 to 8"),
        ({"block_width": 65}, None, "block_width: given 65, allowed: "),
        ({"tap_layers": (1, 0)}, None, "tap_layers: given (1, 0), allowed: "),
        ({"mask_token_id": 64}, None, "mask_token_id: given 64, allowed: "),
        ({"head_dim": 15}, None, "head_dim: given 15, allowed: "),
        ({"rope_theta": NAN}, None, "rope_theta: given nan, allowed: "),
    ],
)

# Meshes --------------------------------------------------------------------------------------------------------------

EIGHT = "allowed: 1, 2, 4 or 8 (8 ranks are shared out evenly)"
MESHES = [
    *rows(
        "make-mesh",
        lambda w, devices: make_mesh(devices() if callable(devices) else devices),
        [
            *[(count, f"devices: given {count}, {EIGHT}") for count in (0, 3, 16, -1)],
            (lambda: jax.devices()[:3], f"devices: given 3, {EIGHT}"),
            (lambda: [jax.devices()[0]] * 2, "devices: given [ ... , but each device may stand only once"),
            (True, "devices: given True, expected a number (1, 2, 4 or 8), a list of devices, or nothing", TypeError),
            ("8", "devices: given '8', expected a number (1, 2, 4 or 8), a list of devices, or nothing", TypeError),
            ([0, 1], "devices: given 0, expected JAX devices, such as jax.devices() gives", TypeError),
        ],
    ),
    *rows(
        "check-mesh",
        lambda w, mesh: check_mesh(mesh()),
        [
            (
                lambda: Mesh(np.array(jax.devices()).reshape(2, 4), ("a", "b")),
                "mesh: given axes {'a': 2, 'b': 4}, expected exactly one axis, 'rank', of 1, 2, 4 or 8 devices; make_",
            ),
            (lambda: Mesh(np.array(jax.devices()[:3]), ("rank",)), f"mesh: given 3 devices, {EIGHT}"),
            (jax.devices, "mesh: given a list, expected a jax.sharding.Mesh; make_mesh() makes one", TypeError),
        ],
    ),
]

# Texts ---------------------------------------------------------------------------------------------------------------

PROMPTS = rows(
    "prompt",
    lambda w, prompts, options: generate(w.model, prompts, **options),
    [
        ([], {}, "prompt_ids is empty; give at least one token id"),
        ([[1], []], {}, "prompt 1 is empty; start it with the beginning-of-text id 1"),
        ([[]], {}, "prompt 0 is empty"),
        ([1, 2], {"max_new_tokens": 0}, "max_new_tokens is 0, allowed: whole numbers from 1 on"),
        ([1, 2], {"max_new_tokens": -3}, "max_new_tokens is -3, allowed: whole numbers from 1 on"),
        ([1, 2], {"max_new_tokens": 95}, "prompt 0 has 2 tokens and max_new_tokens is 95, ... 96 positions"),
        ([[1], [1] * 90], {"max_new_tokens": 7}, "prompt 1 has 90 tokens"),
        ([1, 64], {}, "prompts[0][1] is 64, allowed: 0 to 63"),
        ([[1], [-1]], {}, "prompts[1][0] is -1, allowed: 0 to 63"),
        ([1.5], {}, "prompts: given [1.5], expected token ids (whole numbers) of one prompt or of several", TypeError),
        ("text", {}, "prompts: given 'text', expected token ids (whole numbers)", TypeError),
        ([[[1]]], {}, "prompts: given [[[1]]], expected token ids (whole numbers)", TypeError),
        ({1: 2}, {}, "prompts: given {1: 2}, expected token ids (whole numbers)", TypeError),
        ([1], {"draft": "x"}, "draft: given 'x', expected None or what load_draft(", TypeError),
        ([1], {"stop_ids": [64]}, "stop id 64 is not a token, allowed: 0 to 63"),
        ([1], {"stop_ids": [3, -1]}, "stop id -1 is not a token, allowed: 0 to 63"),
        ([[1]] * 65, {"max_new_tokens": 1}, "batch is 65, allowed: 1 to 64"),
    ],
)

OPTIONS = rows(
    "sampling",
    lambda w, options: Sampling(**options),
    [
        ({"temperature": -1}, "temperature is -1, allowed: 0 (greedy) or 0.01 to 100"),
        ({"temperature": 0.001}, "temperature is 0.001, allowed"),
        ({"temperature": NAN}, "temperature is nan, allowed"),
        ({"temperature": "hot"}, "temperature is 'hot', a str; allowed", TypeError),
        ({"temperature": None}, "temperature is None, a NoneType; allowed", TypeError),
        ({"top_k": 0}, "top_k is 0, allowed: whole numbers from 1 on, or None for all tokens"),
        ({"top_k": 2.5}, "top_k is 2.5, allowed"),
        ({"top_k": True}, "top_k is True, allowed"),
        ({"top_p": 1.5}, "top_p is 1.5, allowed: 0 to 1, or None to leave it out"),
        ({"top_p": NAN}, "top_p is nan, allowed"),
        ({"top_p": "all"}, "top_p is 'all', a str; allowed: 0 to 1, or None", TypeError),
        ({"min_p": -0.1}, "min_p is -0.1, allowed: 0 to 1, or None to leave it out"),
        ({"logit_bias": [1, 2]}, "logit_bias is a list, expected a dict of token id -> bias", TypeError),
        ({"logit_bias": {3: INF}}, "logit_bias[3] is inf, allowed: -10000 to 10000, or -inf to ban"),
        ({"logit_bias": {3: NAN}}, "logit_bias[3] is nan, allowed"),
        ({"logit_bias": {3: "no"}}, "logit_bias[3] is 'no', a str; allowed", TypeError),
    ],
)


def keys(count: int, **options) -> jax.Array:
    return jax.random.split(jax.random.key(0, **options), count)


SAMPLED = rows(
    "sampled",
    lambda w, options: generate(w.model, [[1], [2], [3], [4]], max_new_tokens=4, **options()),
    [
        (
            lambda: {"sampling": Sampling()},
            "sampling needs keys, one per prompt: ... keys=jax.random.split(jax.random.key(0), 4) for 4",
        ),
        (lambda: {"keys": keys(4)}, "keys without sampling draw nothing: give sampling=muse_jax.Sampling(...) too, or"),
        (lambda: {"sampling": [Sampling()] * 3}, "got 3 samplings for 4 prompts; give one for all or one per prompt"),
        (
            lambda: {"sampling": [0.7] * 4},
            "sampling holds a float, expected muse_jax.Sampling(...)",
            TypeError,
        ),
        (
            lambda: {"sampling": Sampling(), "keys": jax.random.key(0)},
            "got 1 keys for 4 prompts; give one key per prompt, for instance keys=jax.random.split(",
        ),
        (lambda: {"sampling": Sampling(), "keys": keys(3)}, "got 3 keys for 4 prompts"),
        (lambda: {"sampling": Sampling(), "keys": 7}, "keys is a int, expected JAX keys", TypeError),
        (
            lambda: {"sampling": Sampling(), "keys": jnp.zeros(4)},
            "keys is float32[4], expected JAX keys",
            TypeError,
        ),
        (lambda: {"sampling": Sampling(), "keys": keys(4, impl="rbg")}, "keys are of rbg, allowed: threefry2x32"),
        (
            lambda: {"sampling": Sampling(logit_bias={64: 1})},
            "logit_bias has 64, which is not a token, allowed: 0 to 63",
        ),
        (lambda: {"sampling": Sampling(logit_bias={-1: 1})}, "logit_bias has -1, which is not a token"),
        (
            lambda: {"sampling": Sampling(logit_bias=dict.fromkeys(range(64), -INF))},
            "bans all 64 tokens; leave at least one",
        ),
        (lambda: {"logprobs": -1}, "logprobs is -1, allowed: 0 (the tokens' own alone) to 20, or None"),
        (lambda: {"logprobs": 21}, "logprobs is 21, allowed"),
        (lambda: {"logprobs": True}, "logprobs is True, allowed"),
    ],
)

STREAMS = [
    *rows(
        "stream",
        lambda w, options: stream(w.model, [1], **options),
        [
            ({"stop_strings": "end"}, "stop_strings is 'end', expected a list of strings", TypeError),
            ({"stop_strings": [3]}, "stop_strings is [3], expected a list of strings", TypeError),
            ({"stop_strings": ["x", ""]}, "stop_strings holds '', allowed: texts that are not empty"),
            ({"stop_strings": ["\ufffd"]}, "stop_strings holds '\ufffd', allowed: ... no U+FFFD"),
            ({"stop_strings": None}, "stop_strings is None, expected a list of strings", TypeError),
            ({"stop_strings": ["\ud800"]}, "stop_strings holds '\\ud800', allowed: ... no surrogates"),
            ({"every": 0}, "every is 0, allowed: whole numbers from 1 on (decode steps)"),
            ({"every": 2.5}, "every is 2.5, allowed"),
            ({"max_new_tokens": "9"}, "max_new_tokens is '9', allowed"),
            (
                {"keys": 7},
                "keys without sampling draw nothing: ... or leave keys out to decode greedily",
            ),
        ],
    ),
    Row(
        "no-tokenizer",
        lambda w, _: generate(w.bare, [1], stop_strings=["end"]),
        ("stop_strings need the model's tokenizer: copy its tokenizer.json into the checkpoint's folder, or give",),
    ),
    Row(
        "vocabulary",
        lambda w, _: as_choice(Sampling(), keys(1), batch=1, vocab=262144),
        ("the vocabulary has 262144 tokens, sampling allows fewer than 262144; decode greedily",),
    ),
    Row(
        "draft-nodes",
        lambda w, _: generate(w.model, [[1]] * 16, max_new_tokens=2, draft=w.draft),
        ("the draft's trees have 8 nodes, allowed for 16 prompts: 1 to 4 (a step has 64 rows)",),
    ),
]

# Steps ---------------------------------------------------------------------------------------------------------------


def changed_rows(count: int, change: dict):
    made = next_rows(jnp.zeros(count, jnp.int32), jnp.zeros(count, jnp.int32))
    return dataclasses.replace(made, **{name: make() for name, make in change.items()})


def zeros(*shape: int, dtype: Any = jnp.int32):
    return lambda: jnp.zeros(shape, dtype)


TWO_LAYERS = "allowed: 0 <= begin <= end <= 2"
STEPS = [
    *rows(
        "rows",
        lambda w, change: run_layers(w.model.weights, w.state, changed_rows(2, change)),
        [
            ({"token": zeros(2, dtype=jnp.float32)}, "rows.token is float32[2], expected int32[2]"),
            ({"token": zeros(2, dtype=jnp.int16)}, "rows.token is int16[2], expected int32[2]"),
            ({"sequence": zeros(3)}, "rows.sequence is int32[3], expected int32[2]"),
            ({"position": zeros(2, 1)}, "rows.position is int32[2, 1], expected int32[2]"),
            ({"ancestors": zeros(2, 3, dtype=bool)}, "rows.ancestors is bool[2, 3], expected bool ... [2, 2]"),
            ({"ancestors": zeros(2, 2, dtype=jnp.int8)}, "rows.ancestors is int8[2, 2], expected bool ... [2, 2]"),
        ],
    ),
    *rows(
        "row-count",
        lambda w, count: run_layers(w.model.weights, w.state, changed_rows(count, {})),
        [(n, f"a step has {n} rows, allowed: 1 to 64; split longer prompts into chunks") for n in (0, 65)],
    ),
    *rows(
        "layers",
        lambda w, layers: run_layers(w.model.weights, w.state, changed_rows(1, {}), layers=layers),
        [(span, f"layers is {span}, {TWO_LAYERS}") for span in ((-1, 1), (2, 1), (0, 3))],
    ),
    *rows(
        "stream-operand",
        lambda w, x: run_layers(w.model.weights, w.state, changed_rows(1, {}), layers=(1, 2), stream=x and x()),
        [
            (None, "layers from 1 on need stream float32[1, 128], got nothing"),
            (zeros(1, 64, dtype=jnp.float32), "layers from 1 on need stream float32[1, 128], got float32[1, 64]"),
            (zeros(1, 128, dtype=jnp.bfloat16), "layers from 1 on need stream float32[1, 128], got bfloat16[1, 128]"),
        ],
    ),
    *rows(
        "head-operand",
        lambda w, x: run_head(w.model.weights, w.state, changed_rows(1, {}), x()),
        [
            (zeros(*shape, dtype=dtype), "expected float32[1, 128]: what run_layers returned")
            for shape, dtype in (
                ((2, 128), jnp.float32),
                ((65, 128), jnp.float32),
                ((1, 128), jnp.bfloat16),
                ((1, 256), jnp.float32),
            )
        ],
    ),
    *rows(
        "tokens",
        lambda w, tokens: decode_step(w.model.weights, w.state, tokens()),
        [
            (zeros(2), "tokens has shape (2,), expected (1,): one token per sequence"),
            (zeros(1, 1), "tokens has shape (1, 1), expected (1,): one token per sequence"),
            (zeros(1, dtype=jnp.float32), "tokens has dtype float32, expected integers", TypeError),
            (lambda: jnp.array([64]), "tokens holds 64, allowed: 0 to 63 (vocab_size 64)"),
        ],
    ),
    *rows(
        "active",
        lambda w, active: w.model.decode_step(w.state, [1], active()),
        [
            (zeros(2, dtype=bool), "active is bool[2], expected bool[1]"),
            (zeros(1), "active is int32[1], expected bool[1]"),
        ],
    ),
    *rows(
        "state",
        lambda w, state: decode_step(w.model.weights, state(w), jnp.zeros(1, jnp.int32)),
        [
            (
                lambda w: init_state(w.model.config.replace(sliding_window=40), w.model.mesh, capacity=16),
                "made for another model than the weights; make one with init_state of this model",
            ),
            (
                lambda w: init_state(w.model.config, make_mesh(2), capacity=16),
                "made for another mesh than the weights; make one with init_state of this model",
            ),
            (lambda w: {}, "state is a dict, expected the DecodeState of init_state or of the last step", TypeError),
            (
                lambda w: w.consumed,
                "this state was consumed by an earlier step; use the state that the step returned",
            ),
        ],
    ),
    *rows(
        "state-size",
        lambda w, batch, capacity: w.model.init_state(batch=batch, capacity=capacity),
        [
            (0, 16, "batch is 0, allowed: 1 to 64 (a step has at most 64 rows)"),
            (65, 16, "batch is 65, allowed: 1 to 64"),
            (1, 0, "capacity is 0, allowed: 1 to 96 (max_position_embeddings)"),
            (1, 97, "capacity is 97, allowed: 1 to 96"),
            ("2", 16, "batch is '2', expected a whole number", TypeError),
            (1, 2.5, "capacity is 2.5, expected a whole number", TypeError),
        ],
    ),
    *rows(
        "prefill",
        lambda w, prompts, chunk: prefill(w.model.weights, w.two, prompts, chunk=chunk),
        [
            ([[1]], 64, "got 1 prompts for a state of 2 sequences; give one per sequence"),
            ([[1], [2, 64]], 64, "prompts[1][1] is 64, allowed: 0 to 63 (vocab_size 64)"),
            ([[-1], [2]], 64, "prompts[0][0] is -1, allowed"),
            ([[1], [2] * 33], 64, "prompt 1 needs 33 positions, the state holds 32; make it with init_state(capacity"),
            ([[1], [2]], 0, "chunk is 0, allowed: 1 to 64"),
            ([[1], [2]], 65, "chunk is 65, allowed: 1 to 64"),
        ],
    ),
    Row(
        "prefill-whole-empty-prompt",
        lambda w, _: prefill_whole(w.model.config, w.two, [[1], []], lambda _: {}),
        ("needs an empty state and a non-empty prompt for every sequence; use prefill",),
    ),
    Row(
        "prefill-whole-used-state",
        lambda w, _: w.model.prefill_whole(w.state, [2]),
        ("needs an empty state and a non-empty prompt for every sequence; use prefill",),
    ),
    *rows(
        "tree",
        lambda w, tokens, parents: tree_rows(tokens, parents, length=0),
        [
            ([], [], "a tree needs 1 to 64 tokens and as many parents, got 0 and 0"),
            ([1] * 65, [-1] * 65, "got 65 and 65"),
            ([1, 2], [-1], "got 2 and 1"),
            ([1, 2], [-1, 1], "parents[1] is 1, allowed: -1 (a root) or 0 to 0 (an earlier node)"),
            ([1, 2], [-2, 0], "parents[0] is -2, allowed: -1 (a root)"),
        ],
    ),
]

REFERENCE = rows(
    "reference",
    lambda w, method, tokens: getattr(w.model, method)(tokens),
    [
        ("reference", np.zeros((1, 3)), "tokens: given float64, expected integers"),
        ("reference", np.zeros((1, 3), bool), "tokens: given bool, expected integers"),
        ("reference", np.zeros(3, int), "tokens: given shape (3,), expected [batch, length]"),
        ("reference", np.zeros((2, 0), int), "tokens: given shape (2, 0), expected at least [1, 1]"),
        ("reference", [], "tokens: given shape (0,), expected [batch, length]"),
        ("reference", [[1, 2], [3]], "tokens: given rows of different lengths, expected [batch, length]"),
        ("reference_taps", np.zeros((0, 2), int), "tokens: given shape (0, 2), expected at least [1, 1]"),
        ("log_probs", [[1]], "tokens: given shape (1, 1), expected at least [1, 2]"),
        ("reference", np.zeros((1, 97), int), "tokens: given sequences of 97, allowed: at most 96 (max_position_emb"),
        ("reference", [[1, 64]], "tokens[0, 1]: given 64, allowed: 0 to 63"),
        ("reference", np.array([[1, 2], [-1, 3]]), "tokens[1, 0]: given -1, allowed: 0 to 63"),
    ],
)

# Updates -------------------------------------------------------------------------------------------------------------

UP, DOWN = (f"layers.0.mlp.experts.{name}_proj" for name in ("gate_up", "down"))
Q = "layers.1.self_attn.q_proj.weight"


def elsewhere(w, name: str) -> jax.Array:
    return jax.device_put(np.asarray(w.model.params[name]), jax.devices()[0])


def spread(w, name: str) -> jax.Array:
    return jax.device_put(w.model.params[name], NamedSharding(w.model.mesh, PartitionSpec(None, "rank")))


UPDATES = [
    Row(f"update-{i}", lambda w, _, given=given: w.model.update(given(w)), tuple(says), *error)
    for i, (given, says, *error) in enumerate(
        [
            (lambda w: 3, ["params: given a int, expected a dict of arrays by name, or nnx state"], TypeError),
            (
                lambda w: {"layers.1.self_attn.q_proj": w.model.params[Q]},
                [f"layers.1.self_attn.q_proj: no such parameter; did you mean {Q}?"],
            ),
            (lambda w: {3: jnp.ones(128)}, ["3: no such parameter"]),
            (lambda w: {"layers.2.norm": jnp.ones(128)}, ["layers.2.norm: no such parameter"]),
            (lambda w: {Q: np.ones((512, 128))}, [f"{Q}: a ndarray, expected a jax.Array on the model's mesh"]),
            (lambda w: {Q: None}, [f"{Q}: a NoneType, expected a jax.Array on the model's mesh"]),
            (lambda w: {Q: w.model.params[Q][:8]}, [f"{Q}: expected bfloat16 [512, 128], found bfloat16 [8, 128]"]),
            (
                lambda w: {Q: w.model.params[Q].astype(jnp.float32)},
                [f"{Q}: expected bfloat16 [512, 128], found float32 [512, 128]"],
            ),
            (
                lambda w: {Q: elsewhere(w, Q)},
                [f"{Q}: lies as SingleDeviceSharding ... expected NamedSharding ... move it there with jax.device_put"],
            ),
            (lambda w: {Q: spread(w, Q)}, [f"{Q}: lies as NamedSharding ... move it there with jax.device_put"]),
            (
                lambda w: {"layers.1.mlp.experts.down_proj": w.copy("norm.weight")},
                ["layers.1.mlp.experts.down_proj: expected bfloat16 [8, 128, 128], found bfloat16 [128]"],
            ),
            (
                lambda w: {UP: w.masters[UP]},
                [f"{UP}: a master alone; give both gate_up_proj and down_proj"],
            ),
            (
                lambda w: {name.replace("layers.0", "layers.1"): w.model.params[name] for name in (UP, DOWN)},
                ["layers.1.mlp.experts.: NVFP4 weights, but expert_formats[1] is 'bf16'"],
            ),
            (
                lambda w: {Q: w.deleted(Q)},
                [f"{Q}: deleted, because a program that it was donated to consumed it"],
            ),
            (
                lambda w: {"norm.weight": w.model.params["norm.weight"], "x": jnp.ones(3), Q: w.model.params[Q][:8]},
                ["x: no such parameter", f"{Q}: expected bfloat16 [512, 128], found bfloat16 [8, 128]"],
            ),
        ]
    )
] + [
    Row(
        "update-inside-jit",
        lambda w, _: jax.jit(lambda x: w.model.update({Q: x}))(w.model.params[Q]),
        (f"{Q}: a value inside a program; call update outside jit",),
    ),
]

# What the words mean -------------------------------------------------------------------------------------------------

INSPECTED = rows(
    "inspect",
    lambda w, options: inspect_checkpoint(w.ours, **options),
    [
        ({"devices": 3}, "devices: given 3, allowed: 1, 2, 4 or 8"),
        ({"devices": "8"}, "devices: given '8', allowed: 1, 2, 4 or 8"),
        ({"batch": 65}, "batch is 65, allowed: 1 to 64"),
        ({"capacity": 97}, "capacity is 97, allowed: 1 to 96"),
        ({"capacity": 0}, "capacity is 0, allowed: 1 to 96"),
    ],
)

COMPARED = rows(
    "parity",
    lambda w, ids, options: parity(w.model, ids, **options),
    [
        ([], {}, "token_ids: given [], expected one text of at least one token id"),
        ([[1], [2]], {}, "token_ids: given [[1], [2]], expected one text of at least one token id"),
        ("abc", {}, "prompts: given 'abc', expected token ids (whole numbers)", TypeError),
        ([1] * 97, {}, "token_ids: given 97, allowed: at most 96 (max_position_embeddings)"),
        ([1, 2], {"steps": -1}, "steps is -1, allowed: 0 to 94 behind 2 tokens (max_position_embeddings 96)"),
        ([1, 2], {"steps": 95}, "steps is 95, allowed: 0 to 94"),
        ([1, 2], {"steps": 1.5}, "steps is 1.5, allowed: 0 to 94"),
    ],
)

OBJECTS = [
    *rows(
        "model",
        lambda w, call: call("checkpoints/tiny", [1]),
        [
            (call, "model: given 'checkpoints/tiny', expected a LanguageModel, such as muse_jax.load(", TypeError)
            for call in (generate, stream, parity)
        ],
    ),
    *rows(
        "guarantee",
        lambda w, devices: guarantee(devices),
        [
            ([], "devices: given [], expected a mesh or JAX devices, such as jax.devices() gives"),
            ("cpu", "devices: given 'cpu', expected a mesh or JAX devices, such as jax.devices() gives"),
        ],
    ),
]

ARGUMENTS = [
    *CONFIG, *DRAFT_CONFIG, *DRAFTS, *MESHES, *PROMPTS, *OPTIONS, *SAMPLED, *STREAMS, *STEPS, *REFERENCE, *UPDATES,
    *INSPECTED, *COMPARED, *OBJECTS,
]  # fmt: skip
