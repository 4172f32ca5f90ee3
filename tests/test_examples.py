"""The examples run as they stand and say what they promise."""

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from dflash_helpers import write_tiny_draft

import muse_jax
from muse_jax import LanguageModel, weights
from muse_jax.config import MuseSparkConfig
from muse_jax.mesh import make_mesh
from muse_jax.tokenizer import byte_tokenizer

ROOT = Path(__file__).parents[1]
SAYS = {
    "decode_in_a_scan.py": "generate gives the same tokens",
    "check_numerics.py": "max |log-probability of the trainer - of the sampler|: 0.0",
    "benchmark.py": "8 x cpu: 0 of ",
}


def run(*command, devices=8):
    flags = f"--xla_force_host_platform_device_count={devices}"
    environment = os.environ | {"PYTHONPATH": str(ROOT), "XLA_FLAGS": flags}
    return subprocess.run([sys.executable, *command], capture_output=True, text=True, timeout=300, env=environment)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    path = tmp_path_factory.mktemp("checkpoints") / "tiny"
    done = run(ROOT / "checkpoints/make_tiny.py", path)
    assert done.returncode == 0, done.stderr
    return path


RL_STEP, LOGPROBS = ROOT / "examples/rl_step.py", ROOT / "examples/logprobs_vs_training.py"
EQUAL = re.compile(
    r"^step +\d+: reward (?P<reward>\S+), max \|log-prob of sampler - of trainer\| 0\.0, KL 0\.0, "
    r"gradient norm (?P<norm>\S+), \d+ decode steps, (?P<text>.*)$",
    re.MULTILINE,
)


@pytest.fixture(scope="module")
def masters(tmp_path_factory):
    """The tiny model's first two layers, one of each kind and format, with bf16 masters."""
    path, tiny = tmp_path_factory.mktemp("checkpoints") / "masters", MuseSparkConfig.tiny()
    config = tiny.replace(
        num_hidden_layers=2, layer_types=tiny.layer_types[:2], layer_rope_theta=tiny.layer_rope_theta[:2],
        expert_formats=("nvfp4", "bf16"),
    )  # fmt: skip
    weights.save(path, config, weights.random_params(config, 0, make_mesh()), byte_tokenizer())
    return path


def test_all_examples_are_run():
    assert {path.name for path in (ROOT / "examples").glob("*.py")} == {*SAYS, RL_STEP.name, LOGPROBS.name}


@pytest.mark.parametrize("name", SAYS)
def test_example(checkpoint, name):
    done = run(ROOT / "examples" / name, checkpoint)
    assert done.returncode == 0, done.stdout + done.stderr
    assert SAYS[name] in done.stdout


@pytest.mark.parametrize("name", SAYS)
def test_example_without_a_checkpoint(name, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [name])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(ROOT / "examples" / name), run_name="__main__")
    said = capsys.readouterr().err
    assert ended.value.code == 2 and said.startswith(f"usage: {name} ")
    assert said.endswith("the following arguments are required: checkpoint\n")


def test_rl_step(masters, tmp_path):
    """With a draft: no difference in any step, a growing reward, other texts, and nearly every parameter has moved."""
    draft = write_tiny_draft(tmp_path / "draft", taps=(0, 1), layers=2)
    done = run(RL_STEP, masters, "--draft", draft, "--steps", "3", "--save", tmp_path / "trained", devices=2)
    assert done.returncode == 0, done.stdout + done.stderr
    steps = [match.groupdict() for match in EQUAL.finditer(done.stdout)]
    assert len(steps) == 3 and "agree to the last bit" in done.stdout
    assert len({step["text"] for step in steps}) > 1 and all(float(step["norm"]) > 0 for step in steps)
    assert float(steps[-1]["reward"]) > float(steps[0]["reward"])
    before, after = (weights.load(path, make_mesh())[1] for path in (masters, tmp_path / "trained"))
    still = {name for name in before if np.array_equal(before[name], after[name])}
    assert still == {name for name in before if name.endswith("e_score_correction_bias")}  # it only chooses


@pytest.mark.slow
def test_rl_step_sees_a_difference(masters, monkeypatch, capsys):
    """A sampler that missed an update of the trainer's ends the program with exit code 1."""
    monkeypatch.setattr(LanguageModel, "update", lambda self, params: None)
    monkeypatch.setattr(muse_jax, "make_mesh", lambda: make_mesh(1))
    monkeypatch.setattr(sys, "argv", [str(RL_STEP), str(masters), "--steps", "2"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(RL_STEP), run_name="__main__")
    said = capsys.readouterr().out
    assert ended.value.code and "differ" in said and len(EQUAL.findall(said)) == 1


def test_logprobs_vs_training(checkpoint, tmp_path):
    """The fused step's column is 0 in every line, plain XLA's in none and grows; and there is a picture."""
    pytest.importorskip("matplotlib")
    done = run(LOGPROBS, checkpoint, "--plot", tmp_path / "plot.png")
    assert done.returncode == 0, done.stdout + done.stderr
    lines = re.findall(r"^(layers\.\d\.post_\w+_residual|log-probabilities) +(\S+) +(\S+) +\S+%$", done.stdout, re.M)
    assert len(lines) == 2 * 6 + 1 and all(float(ours) == 0 for _, ours, _ in lines)
    theirs = [float(rms) for _, _, rms in lines]
    assert 0 < theirs[0] < 1e-3 < theirs[-2] and min(theirs) > 0
    assert "fused step 0.0," in done.stdout and "differ from training in a byte: 0 of 13" in done.stdout
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


def test_the_other_implementation_is_right():
    """Each branch of it on the reference's own stream: most rows within fp32 rounding, the rest within bf16's."""
    pytest.importorskip("matplotlib")
    plain, config, mesh = runpy.run_path(str(LOGPROBS)), MuseSparkConfig.tiny(), make_mesh(1)
    params = weights.random_params(config, 3, mesh, quantized=True)
    model = LanguageModel(config, params, mesh)
    tokens = np.random.default_rng(0).integers(0, 256, (1, 72))  # beyond the window
    taps = {name: x[0] for name, x in model.reference_taps(tokens).items()}
    norm, eps, before = plain["norm"], config.rms_norm_eps, taps["embedding"]
    for i in range(config.num_hidden_layers):
        prefix = f"layers.{i}."
        w = {name.removeprefix(prefix): x for name, x in params.items() if name.startswith(prefix)}
        middle, after = taps[prefix + "post_attention_residual"], taps[prefix + "post_feedforward_residual"]
        n = plain["attention"](config, i, w, norm(before, eps, w["input_layernorm.weight"]))
        y = plain["moe"](config, i, w, norm(middle, eps, w["pre_feedforward_layernorm.weight"]))
        y = plain["scaled_norm"](y, config.post_norm_eps, w["post_feedforward_layernorm.weight"])
        for s, n_, want, gate in ((before, n, middle, "post_attention"), (middle, y, after, "post_feedforward")):
            got = plain["residual"](config, s, n_, w[f"{gate}_residual_gate.gate"])
            rms = np.sqrt(np.mean((np.asarray(got) - want) ** 2, axis=1) / np.mean(np.square(want), axis=1))
            assert np.median(rms) < 2e-4 and np.max(rms) < 5e-3, (i, gate, np.median(rms), np.max(rms))
        before = after
