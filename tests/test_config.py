"""The configuration: presets, validation messages, exact round trips."""

import dataclasses
import json
import os
import pickle
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from muse_jax.config import MuseSparkConfig
from muse_jax.errors import ConfigError

TINY, RELEASED = MuseSparkConfig.tiny(), MuseSparkConfig.released()


def problems_of(**changes) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        TINY.replace(**changes)
    assert isinstance(caught.value, ValueError)
    return list(caught.value.problems)


def test_released_preset():
    full = [i for i, kind in enumerate(RELEASED.layer_types) if kind == "full_attention"]
    assert full == list(range(1, 62, 4))
    assert [i for i, theta in enumerate(RELEASED.layer_rope_theta) if theta == 0] == full
    assert [i for i, kind in enumerate(RELEASED.expert_formats) if kind == "bf16"] == [0, 61]
    assert RELEASED.rope_theta == 500000.0 and RELEASED.attention_size == 8192
    assert RELEASED.eos_token_ids == (200001, 200008)
    assert RELEASED.activation_format == "nvfp4"


def test_tiny_preset():
    assert [i for i, kind in enumerate(TINY.layer_types) if kind == "full_attention"] == [1, 5]
    assert TINY.expert_formats == ("bf16", "nvfp4", "nvfp4", "nvfp4", "nvfp4", "bf16")
    assert (TINY.bos_token_id, TINY.eos_token_ids, TINY.sliding_window) == (256, (257,), 32)


@pytest.mark.parametrize("config", [TINY, RELEASED])
def test_round_trips(config):
    assert MuseSparkConfig.from_hf(config.to_hf()) == config
    assert MuseSparkConfig.from_hf(json.loads(config.to_json())) == config
    assert hash(pickle.loads(pickle.dumps(config))) == hash(config)


def test_lists_and_integers_are_normalised():
    config = TINY.replace(layer_rope_theta=[0, 0, 0, 0, 0, 500000], eos_token_ids=[], output_multiplier=1)
    assert config.layer_rope_theta == (0.0, 0.0, 0.0, 0.0, 0.0, 500000.0)
    assert isinstance(config.output_multiplier, float) and config.eos_token_ids == ()
    assert TINY.replace(layer_rope_theta=[0] * 6).rope_theta == 0.0
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.hidden_size = 128  # type: ignore


def test_joint_limit_of_scores_and_positions():
    found = problems_of(qk_scale_factor=10, max_position_embeddings=2**20)
    assert found == [
        "qk_scale_factor: given 10.0, allowed: at most 9.3546 with max_position_embeddings 1048576; "
        "a softmax denominator over that many positions must fit fp32; reduce either"
    ]


def test_all_problems_at_once():
    with pytest.raises(ConfigError) as caught:
        TINY.replace(hidden_size=1, head_dim=80, vocab_size="x", activation_format=None, eos_token_ids=None)
    text = str(caught.value)
    assert text.startswith("invalid MuseSparkConfig: 5 problems\n  - ")
    assert [line.split(":")[0] for line in text.splitlines()[1:]] == [
        "  - vocab_size",
        "  - hidden_size",
        "  - head_dim",
        "  - eos_token_ids",
        "  - activation_format",
    ]


# --- properties -----------------------------------------------------------------------------------------------------


@st.composite
def configs(draw):
    layers = draw(st.integers(1, 9))
    kv, experts = 8 * draw(st.integers(1, 3)), 8 * draw(st.integers(1, 40))
    vocab = 8 * draw(st.integers(1, 50000))
    theta = draw(st.floats(1.5, 1e7))
    tokens = st.integers(0, vocab - 1)
    eps = st.floats(1e-12, 1.0)
    return MuseSparkConfig(
        vocab_size=vocab, hidden_size=128 * draw(st.integers(1, 64)), num_hidden_layers=layers,
        num_attention_heads=kv * draw(st.integers(1, 8)), num_key_value_heads=kv, head_dim=64,
        moe_hidden_size=128 * draw(st.integers(1, 32)), moe_intermediate_size=128 * draw(st.integers(1, 32)),
        num_local_experts=experts, num_experts_per_tok=draw(st.integers(1, min(16, experts))),
        routed_scaling_factor=draw(st.floats(0.01, 100)), rms_norm_eps=draw(eps), post_norm_eps=draw(eps),
        qk_scale_factor=draw(st.floats(0.01, 9)), output_multiplier=draw(st.floats(1e-3, 10)),
        final_logit_softcapping=draw(st.floats(1, 70)), residual_gate_temperature=draw(st.floats(0.01, 10)),
        sliding_window=draw(st.integers(1, 10**6)),
        layer_types=draw(st.tuples(*[st.sampled_from(["full_attention", "sliding_attention"])] * layers)),
        layer_rope_theta=draw(st.tuples(*[st.sampled_from([0.0, theta])] * layers)),
        max_position_embeddings=draw(st.integers(1, 2**20)), bos_token_id=draw(tokens),
        eos_token_ids=tuple(draw(st.lists(tokens, max_size=3))), pad_token_id=draw(st.none() | tokens),
        expert_formats=draw(st.tuples(*[st.sampled_from(["bf16", "nvfp4"])] * layers)),
        activation_format=draw(st.sampled_from(["nvfp4", "bf16"])),
    )  # fmt: skip


@given(configs())
def test_any_valid_configuration_round_trips_exactly(config):
    assert MuseSparkConfig.from_hf(json.loads(config.to_json())) == config


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


@given(st.sampled_from([f.name for f in dataclasses.fields(MuseSparkConfig)]), JSON)
def test_garbage_fields_give_a_configuration_or_a_config_error(name, value):
    try:
        TINY.replace(**{name: value})
    except ConfigError as error:
        assert any(problem.startswith(name) for problem in error.problems) or name == "num_hidden_layers"


def test_no_backend_is_started():
    """Reading a configuration, and importing the library, leave the choice of devices to the user."""
    code = "import muse_jax.config, jax; jax.config.update('jax_num_cpu_devices', 3); assert len(jax.devices()) == 3"
    environment = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment)
