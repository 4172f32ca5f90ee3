"""Input scales from text: the bits of the model, the oracle's largest activations, what may be wrong."""

import re

import jax.numpy as jnp
import numpy as np
import oracle.model
import pytest
from oracle.formats import widen
from oracle.moe import bf16_expert, swiglu
from safetensors.numpy import load_file, save_file
from typer.testing import CliRunner
from weight_helpers import SMALL, same_bytes

from muse_jax import calibration, weights
from muse_jax.calibration import calibrate
from muse_jax.cli import app
from muse_jax.errors import CheckpointError
from muse_jax.model import Reference
from muse_jax.tokenizer import byte_tokenizer
from muse_jax.weights import convert_checkpoint
from muse_jax.weights.checkpoints import open_source
from muse_jax.weights.quantize import read_input_scales, write_input_scales

BF16 = SMALL.replace(vocab_size=384, expert_formats=("bf16",) * 3)
TEXT = "def decode(state, tokens): return 7"
E1 = "layers.1.mlp.experts."


@pytest.fixture(scope="module", autouse=True)
def short_sequences():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(calibration, "SEQUENCE", 16)
        yield


@pytest.fixture(scope="module")
def params():
    return weights.random_params(BF16, 3)


@pytest.fixture(scope="module")
def folder(params, tmp_path_factory):
    path = tmp_path_factory.mktemp("calibration") / "model"
    weights.save(path, BF16, params, byte_tokenizer())
    return path


@pytest.fixture(scope="module")
def scales(folder):
    steps = []
    found = calibrate(folder, TEXT, progress=lambda *step: steps.append(step))
    assert steps == sorted(steps) and steps[-1][0] == steps[-1][1]
    return found


def sequences():
    ids = np.array(byte_tokenizer().encode(TEXT).ids, np.int32)
    return [ids[i : i + 16] for i in range(0, len(ids), 16)]


def test_the_references_bits(folder, params):
    """The stream after every layer, also of a short last sequence."""
    _, source = open_source(folder, None)
    run, model = calibration._Calibration(source, sequences(), None), Reference(BF16)
    taps = [model.taps(params, ids[None]) for ids in sequences()]
    for layer in range(3):
        run.layer(layer)
        for stream, tap in zip(run.streams, taps, strict=True):
            expected = np.asarray(tap[f"layers.{layer}.post_feedforward_residual"])
            assert np.asarray(stream).tobytes() == expected.tobytes()


def test_scales_are_the_oracles(scales, params, monkeypatch):
    largest = []

    def recording(experts):
        run, seen = bf16_expert(experts), {}
        largest.append(seen)
        width = experts["gate_up_proj"].shape[1] // 2

        def call(rows, i):
            w = experts["gate_up_proj"][i]
            m = swiglu(oracle.model.gemm(rows, w[:width]), oracle.model.gemm(rows, w[width:]))
            seen[i] = (np.abs(widen(rows)).max(), np.abs(widen(m)).max())
            return run(rows, i)

        return call

    monkeypatch.setattr(oracle.model, "bf16_expert", recording)
    arrays = {name: np.asarray(array) for name, array in params.items()}
    for ids in sequences():
        oracle.model.forward(BF16, arrays, ids)
    for layer in range(3):
        seen = [found for i, found in enumerate(largest) if i % 3 == layer]
        for k, name in ((0, "gate_up_proj_input_scale"), (1, "down_proj_input_scale")):
            of = [max((found[e][k] for found in seen if e in found), default=None) for e in range(8)]
            most = max(value for value in of if value is not None)
            expected = np.array([most if value is None else value for value in of], np.float32) / np.float32(2688)
            found = scales[f"layers.{layer}.mlp.experts.{name}"]
            assert found.dtype == np.float32
            assert np.array_equal(found, np.stack([expected, expected], axis=1) if k == 0 else expected)
    leaves = ("gate_up_proj_input_scale", "down_proj_input_scale")
    assert list(scales) == [f"layers.{i}.mlp.experts.{leaf}" for i in range(3) for leaf in leaves]


def test_experts_that_nobody_chose(folder, params):
    """One token chooses two experts; the others have the larger of their scales."""
    found = calibrate(folder, "x")
    chosen = np.asarray(Reference(BF16).taps(params, np.array([[ord("x")]]))["layers.1.router_experts"])[0, 0]
    down = found[E1 + "down_proj_input_scale"]
    rest = np.delete(down, chosen)
    assert len(np.unique(found[E1 + "gate_up_proj_input_scale"])) == 1
    assert (rest == down[chosen].max()).all() and len(np.unique(down)) == 2


def test_from_text_to_a_quantised_checkpoint(folder, params, scales, tmp_path):
    """The commands; the scales reach the checkpoint, and nothing else changes."""
    (tmp_path / "text").write_text(TEXT)

    def run(*arguments, code=0):
        with pytest.MonkeyPatch.context() as patch:  # this process has its devices already
            patch.setattr("muse_jax.cli._prepare_cpu", lambda devices: None)
            patch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
            done = CliRunner().invoke(app, [str(a) for a in arguments])
        assert done.exit_code == code, done.output
        return done

    done = run("calibrate", folder, tmp_path / "text", tmp_path / "scales")
    assert re.search(r"^input scales +.*/scales, 72 from 0\.\d+ to 0\.\d+$", done.stdout, re.M)
    assert re.search(r"^calibrated 4\.\d MB in ", done.stderr, re.M)
    written = load_file(tmp_path / "scales")
    assert {n: a.tobytes() for n, a in written.items()} == {n: a.tobytes() for n, a in scales.items()}
    assert "exists already" in str(run("calibrate", folder, tmp_path / "text", tmp_path / "scales", code=1).exception)
    run("convert", folder, tmp_path / "m", "--to", "orbax", "--quantize", "--input-scales", tmp_path / "scales")
    run("convert", folder, tmp_path / "unit", "--to", "orbax", "--quantize")
    config, quantised = weights.load(tmp_path / "m")
    unit = weights.load(tmp_path / "unit")[1]
    assert config == BF16.replace(expert_formats=("bf16", "nvfp4", "bf16"))
    for name in unit:
        same = np.array_equal(np.asarray(quantised[name]), np.asarray(unit[name]))
        assert same != name.endswith("_input_scale")
    assert np.array_equal(quantised[E1 + "down_proj_input_scale"], scales[E1 + "down_proj_input_scale"])
    kept = {name: array for name, array in params.items() if name in quantised and quantised[name].dtype == array.dtype}
    assert len(kept) == len(params) - 2 and same_bytes({name: quantised[name] for name in kept}, kept)


def test_quiet_activations_need_their_scales(params, tmp_path):
    """Inputs of 1/256 the usual size: with scales of 1 their blocks' scales would be e4m3's smallest numbers."""
    name = "layers.1.mlp.pre_expert_norm.weight"
    quiet = {**params, name: jnp.full_like(params[name], 2**-8 - 1)}
    weights.save(tmp_path / "quiet", BF16, quiet, byte_tokenizer())
    write_input_scales(tmp_path / "scales", calibrate(tmp_path / "quiet", TEXT), {})
    for name, scales in (("calibrated", tmp_path / "scales"), ("unit", None)):
        convert_checkpoint(tmp_path / "quiet", tmp_path / name, to="orbax", quantize=True, input_scales=scales)
    ids = np.array([byte_tokenizer().encode(TEXT).ids])
    exact = Reference(BF16).taps(quiet, ids)["layers.1.post_feedforward_residual"]
    errors = []
    for name in ("calibrated", "unit"):
        config, found = weights.load(tmp_path / name)
        tap = Reference(config).taps(found, ids)["layers.1.post_feedforward_residual"]
        errors.append(float(jnp.abs(tap - exact).mean()))
    assert errors[0] < 0.5 * errors[1], errors


def problems_of(function, *arguments, **options) -> list[str]:
    with pytest.raises(CheckpointError) as caught:
        function(*arguments, **options)
    return list(caught.value.problems)


def test_what_cannot_be_calibrated(folder, params, tmp_path):
    with pytest.raises(ValueError, match=r"^text: gives no tokens; give some text"):
        calibrate(folder, "")
    weights.save(tmp_path / "codes", SMALL.replace(vocab_size=384), weights.random_params(
        SMALL.replace(vocab_size=384), 3, quantized=True), byte_tokenizer())  # fmt: skip
    (problem,) = problems_of(calibrate, tmp_path / "codes", TEXT)
    assert problem == (
        "layers.1.mlp.experts: expected bf16, found NVFP4; calibrate the bf16 checkpoint that it was made from"
    )
    small = BF16.replace(vocab_size=64)
    weights.save(tmp_path / "vocabulary", small, weights.random_params(small, 3), byte_tokenizer())
    with pytest.raises(ValueError, match=r"^text: token 117 is outside the vocabulary of 64$"):
        calibrate(tmp_path / "vocabulary", TEXT)
    weights.save(tmp_path / "none", BF16, params)
    assert problems_of(calibrate, tmp_path / "none", TEXT)[0].startswith("tokenizer.json: No such file")
    huge = {**params, E1 + "gate_up_proj": jnp.full_like(params[E1 + "gate_up_proj"], 3e38)}
    weights.save(tmp_path / "huge", BF16, huge, byte_tokenizer())
    assert problems_of(calibrate, tmp_path / "huge", TEXT) == ["layers.1: activations are not finite on this text"]


def test_what_is_wrong_with_scales(folder, scales, tmp_path):
    config = BF16.replace(expert_formats=("bf16", "nvfp4", "bf16"))
    specs, file = weights.parameter_specs(config), tmp_path / "scales"
    write_input_scales(file, scales, {"note": "x"})
    assert set(read_input_scales(file, specs)) == {E1 + "gate_up_proj_input_scale", E1 + "down_proj_input_scale"}
    bad = {E1 + "gate_up_proj_input_scale": np.ones((8, 3), np.float32)}
    save_file(bad, file)
    assert problems_of(convert_checkpoint, folder, tmp_path / "m", quantize=True, input_scales=file) == [
        f"{file}: {E1}gate_up_proj_input_scale: expected float32 [8, 2], found float32 [8, 3]",
        f"{file}: {E1}down_proj_input_scale: missing, expected float32 [8]",
    ]
    zero = {**scales, E1 + "down_proj_input_scale": np.array([1, 0, 1, 1, 1, np.nan, 1, 1], np.float32)}
    save_file(zero, file)
    assert problems_of(convert_checkpoint, folder, tmp_path / "m", quantize=True, input_scales=file) == [
        f"{file}: {E1}down_proj_input_scale: expected scales that are finite and above 0, found 2 other(s), the first "
        "one 0.0 at [1]"
    ]
    file.write_bytes(b"x")
    assert "cannot be read as safetensors" in problems_of(
        convert_checkpoint, folder, tmp_path / "m", quantize=True, input_scales=file
    )[0]  # fmt: skip
    with pytest.raises(ValueError, match="input_scales: of no use without quantize"):
        convert_checkpoint(folder, tmp_path / "m", input_scales=file)
    assert not (tmp_path / "m").exists()
