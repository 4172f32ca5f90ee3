"""Reading Hugging Face configurations: what is understood, what is refused by name, hostile input."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from muse_jax.config import MuseSparkConfig
from muse_jax.errors import ConfigError

TINY, RELEASED = MuseSparkConfig.tiny(), MuseSparkConfig.released()


def hf_problems(data) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        MuseSparkConfig.from_hf(data)
    return list(caught.value.problems)


def hf(**text) -> dict:
    """A foreign (not our own) configuration: no "muse_jax" section."""
    data = TINY.to_hf()
    del data["muse_jax"]
    data["text_config"] |= text
    return data


def test_nested_and_flat_forms_agree():
    data = hf()
    assert MuseSparkConfig.from_hf(data) == MuseSparkConfig.from_hf(data["text_config"])
    assert MuseSparkConfig.from_hf(data) == TINY.replace(expert_formats=("bf16",) * 6)


def test_absent_layer_lists_follow_the_rule():
    data = hf()
    for name in ("layer_types", "layer_rope_theta", "pad_token_id", "head_dim", "rms_norm_eps"):
        del data["text_config"][name]
    data["text_config"]["rope_parameters"]["rope_theta"] = 10000.0
    config = MuseSparkConfig.from_hf(data)
    assert config.layer_types == TINY.layer_types and config.pad_token_id is None and config.rms_norm_eps == 1e-5
    assert config.layer_rope_theta == tuple(10000.0 if theta else 0.0 for theta in TINY.layer_rope_theta)


UNSUPPORTED = [
    (
        {"mlp_layer_types": ["dense"] + ["sparse"] * 5},
        "mlp_layer_types: given {0: 'dense'}, supported: 'sparse' in every layer; dense MLP layers are not implemented",
    ),
    ({"num_shared_experts": 1}, "num_shared_experts: given 1, supported: 0; shared experts are not implemented"),
    ({"attention_bias": True}, "attention_bias: given True, supported: false; no projection has a bias"),
    ({"hidden_act": "gelu"}, "hidden_act: given 'gelu', supported: 'silu'"),
    (
        {"tie_word_embeddings": True},
        "tie_word_embeddings: given True, supported: false; untie: store the embedding again as lm_head.weight",
    ),
    (
        {"rope_scaling": {"type": "yarn"}},
        "rope_scaling: given {'type': 'yarn'}, supported: null; scaled RoPE is not implemented",
    ),
    (
        {"rope_parameters": {"rope_type": "yarn", "rope_theta": 500000.0}},
        "rope_parameters: given {'rope_type': 'yarn', 'rope_theta': 500000.0}, supported: rope_type 'default'; "
        "scaled RoPE is not implemented",
    ),
    ({"rope_parameters": 3}, "rope_parameters: given 3, supported: an object with rope_type and rope_theta"),
    (
        {"partial_rotary_factor": 0.5},
        "partial_rotary_factor: given 0.5, supported: 1.0; all 64 dimensions of a head rotate",
    ),
    (
        {"model_type": "llama"},
        "model_type: given 'llama', supported: 'muse_spark' or 'muse_spark_text'; "
        "this is another model's configuration",
    ),
    (
        {"rope_parameters": {"rope_theta": 10000.0}},
        "layer_rope_theta: given 500000.0 where rope_parameters.rope_theta is 10000.0, allowed: 0 or that value; "
        "make the two agree",
    ),
    ({"hidden_size": None}, "hidden_size: missing; every Muse Spark config.json has it"),
    ({"num_hidden_layers": 10**9}, "num_hidden_layers: given 1000000000, allowed: an integer from 1 to 10000"),
]


@pytest.mark.parametrize(("text", "message"), UNSUPPORTED)
def test_unsupported_settings_are_named(text, message):
    assert hf_problems(hf(**text)) == [message]


def test_reading_and_validation_problems_come_together():
    found = hf_problems(hf(hidden_act="gelu", hidden_size=100))
    assert [problem.split(":")[0] for problem in found] == ["hidden_act", "hidden_size"]


def test_end_of_text_tokens(tmp_path):
    assert MuseSparkConfig.from_hf(hf(eos_token_id=None)).eos_token_ids == ()
    assert MuseSparkConfig.from_hf(hf(eos_token_id=[1, 2])).eos_token_ids == (1, 2)
    released = RELEASED.to_hf()
    del released["muse_jax"]
    released["text_config"]["eos_token_id"] = 200001
    assert MuseSparkConfig.from_hf(released).eos_token_ids == (200001, 200008)
    (tmp_path / "config.json").write_text(json.dumps(hf()))
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [257, 300]}')
    assert MuseSparkConfig.from_hf(tmp_path).eos_token_ids == (257, 300)


NVFP4 = {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16}


@pytest.mark.parametrize(
    ("section", "bf16_layers"),
    [
        (NVFP4, [0, 5]),
        (NVFP4 | {"ignore": ["lm_head", "model.language_model.layers.3.self_attn*"]}, [0, 5]),
        (NVFP4 | {"ignore": ["model.language_model.layers.2.mlp.experts"]}, [2]),
        (NVFP4 | {"ignore": ["model.layers.2"]}, [2]),
        (NVFP4 | {"exclude_modules": ["model.language_model.layers.[24].mlp.experts*"]}, [2, 4]),
        (NVFP4 | {"ignore": ["re:.*layers\\.(1|5)\\.mlp.*", "re:("]}, [1, 5]),
        (NVFP4 | {"ignore": ["*.experts.*"]}, [0, 1, 2, 3, 4, 5]),
        ({"producer": {}, "quantization": {"quant_algo": "NVFP4", "exclude_modules": ["layers.1.*"]}}, [1]),
    ],
)
def test_expert_formats_from_the_quantisation_section(section, bf16_layers, tmp_path):
    expected = tuple("bf16" if i in bf16_layers else "nvfp4" for i in range(6))
    assert MuseSparkConfig.from_hf(hf() | {"quantization_config": section}).expert_formats == expected
    (tmp_path / "config.json").write_text(json.dumps(hf()))
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(section))
    assert MuseSparkConfig.from_hf(tmp_path).expert_formats == expected
    assert MuseSparkConfig.from_hf(tmp_path / "config.json").expert_formats == expected


@pytest.mark.parametrize(
    ("section", "message"),
    [
        (
            {"quant_method": "compressed-tensors"},
            "quantization_config.quant_method: given 'compressed-tensors', supported: 'modelopt'; "
            "other exporters store reciprocal scales under other names",
        ),
        (
            {"quant_algo": "FP8"},
            "quantization_config.quant_algo: given 'FP8', supported: 'NVFP4'; or use the bf16 checkpoint",
        ),
        (NVFP4 | {"group_size": 32}, "quantization_config.group_size: given 32, supported: 16"),
        (NVFP4 | {"ignore": "lm_head"}, "quantization_config.ignore: given 'lm_head', expected a list of module names"),
        ("nvfp4", "quantization_config: given 'nvfp4', expected an object"),
    ],
)
def test_other_quantisations_are_refused(section, message):
    assert hf_problems(hf() | {"quantization_config": section}) == [message]


def test_unreadable_files(tmp_path):
    cases = [
        (None, "No such file or directory; check the path and its permissions"),
        (b"{", "not valid JSON (Expecting property name enclosed in double quotes: line 1 column 2 (char 1)); "
               "download the file again"),
        (b"[1]", "holds a list, expected a JSON object"),
        (b"[" * 100000, "not valid JSON (maximum recursion depth exceeded while decoding a JSON array from a unicode "
                        "string); download the file again"),
    ]  # fmt: skip
    for content, message in cases:
        if content is not None:
            (tmp_path / "config.json").write_bytes(content)
        with pytest.raises(ConfigError) as caught:
            MuseSparkConfig.from_hf(tmp_path)
        assert caught.value.headline == f"cannot read {tmp_path / 'config.json'}"
        assert caught.value.problems == (message,)
    (tmp_path / "config.json").write_bytes(b"\xff\xfe{}")
    assert "not valid JSON ('utf-8' codec can't decode" in hf_problems(tmp_path)[0]


def test_text_config_must_be_an_object():
    assert hf_problems({"text_config": 3}) == [
        "text_config: given 3, expected an object with the decoder's settings",
    ]
    assert hf_problems({})[0] == "vocab_size: missing; every Muse Spark config.json has it"


# --- hostile input ------------------------------------------------------------------------------------------------

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
KEYS = sorted(TINY.to_hf()["text_config"])


@given(
    st.lists(st.tuples(st.sampled_from([*KEYS, "muse_jax", "quantization_config", "rope_scaling"]), JSON), max_size=4)
)
def test_garbage_values_give_a_configuration_or_a_config_error(changes):
    data = hf()
    for key, value in changes:
        data["text_config" if key in KEYS else key] = (
            {**data["text_config"], key: value} if key in KEYS else value
        )  # fmt: skip
    try:
        config = MuseSparkConfig.from_hf(data)
    except ConfigError as error:
        assert error.problems
    else:
        assert MuseSparkConfig.from_hf(config.to_hf()) == config


@given(st.binary(max_size=60), st.integers(0, 10**6))
def test_damaged_config_files(tmp_path_factory, noise, position):
    folder = tmp_path_factory.mktemp("config")
    data = bytearray(TINY.to_json().encode())
    position %= len(data)
    data[position : position + len(noise)] = noise
    (folder / "config.json").write_bytes(data)
    try:
        MuseSparkConfig.from_hf(folder)
    except ConfigError as error:
        assert error.problems
