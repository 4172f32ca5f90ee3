"""The command line, run as a user runs it; test_commands.py runs what the documents show."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from dflash_helpers import write_tiny_draft

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory):
    """Of this file alone, and for every program: what is in it is compared."""
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JAX_COMPILATION_CACHE_DIR", str(folder))
        patch.setenv("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
        yield folder


def run(*arguments, code=0, cwd=ROOT):
    environment = {k: v for k, v in os.environ.items() if k not in ("XLA_FLAGS", "PJRT_NPROC")}
    done = subprocess.run(
        [sys.executable, *map(str, arguments)], capture_output=True, text=True, cwd=cwd, env=environment, timeout=300
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout if code in (0, 1) else done.stderr


def muse(*arguments, code=0):
    return run("-m", "muse_jax.cli", *arguments, code=code)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    path = tmp_path_factory.mktemp("checkpoints") / "tiny"
    run(ROOT / "checkpoints" / "make_tiny.py", path)
    return path


def test_generate(checkpoint):
    out = muse("generate", checkpoint, "--max-new-tokens", 8, "--check")
    assert "differing bytes: 0 of" in out and re.search(r"8 x cpu, 8 ranks", out)
    assert re.search(r"custom calls per step +1 ", out) and re.search(r"guarantee +bitwise\n", out)
    ids = re.search(r"token ids +([\d ]+)", out)
    two = muse("generate", checkpoint, "--max-new-tokens", 8, "--devices", 2)
    assert "2 x cpu" in two and ids is not None and ids.group(1).strip() in two


def test_a_second_process_compiles_nothing(checkpoint, cache):
    """The programs of the first, from JAX's persistent cache, give the same text."""

    def programs():
        return {path.name for path in cache.iterdir() if path.name.startswith(("jit_advance", "jit__layers"))}

    command = ("generate", checkpoint, "--max-new-tokens", 8)
    first, made = muse(*command), programs()
    assert len(made) > 1 and muse(*command) == first and programs() == made


def test_generate_samples(checkpoint):
    """The same text with the same seed on any mesh; a table of log-probabilities."""
    options = ("--max-new-tokens", 6, "--temperature", 0.8, "--top-k", 40, "--top-p", 0.95, "--min-p", 0.01)
    outputs = [
        muse("generate", checkpoint, *options, "--seed", 7, "--devices", 2, "--logprobs", 2),
        muse("generate", checkpoint, *options, "--seed", 7, "--devices", 1),
    ]
    ids = [m.group(1).split() for out in outputs if (m := re.search(r"token ids +([\d ]+)", out))]
    assert len(ids) == 2 and ids[0] == ids[1]
    streamed = muse("generate", checkpoint, "--max-new-tokens", 40, "--stream", "--stop", "4", "--devices", 1)
    assert re.search(r"finished by +stop_string\n", streamed) and not streamed.startswith("prompt")
    rows = re.findall(r"│ (\d+) +│ .* │ -\d+\.\d{4} +│ \d+ -\d+\.\d{4}  \d+ -\d+\.\d{4} +│", outputs[0])
    assert rows == ids[0]


@pytest.mark.parametrize(
    ("name", "tap"),
    [
        ("layers.2.self_attn.k_proj.weight:5:14", "layers.2.k"),
        ("layers.4.mlp.gate.weight:0:22", "layers.4.router_weights"),
        ("layers.1.mlp.post_expert_proj.weight", "layers.1.post_feedforward_residual"),
        ("lm_head.weight:3", "logits"),
    ],
)
def test_flipped_bit_is_found(checkpoint, name, tap):
    out = muse("parity", checkpoint, "--steps", 4, "--flip-bit", name, code=1)
    assert f"first difference: {tap}," in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["generate", "nowhere"], "no such folder"),
        (["parity", "CHECKPOINT", "--flip-bit", "layers.3.o_proj"], "no parameter 'layers.3.o_proj'"),
        (["parity", "CHECKPOINT", "--flip-bit", "norm.weight:999"], "elements 0 to 255"),
        (["parity", "CHECKPOINT", "--flip-bit", "norm.weight:x"], "expected NAME[:ELEMENT[:BIT]]"),
        (
            ["generate", "CHECKPOINT", "--max-new-tokens", "0"],
            "--max-new-tokens is 0, allowed: whole numbers from 1 on",
        ),
        (["generate", "CHECKPOINT", "--seed", str(2**32)], "--seed is 4294967296, allowed: 0 to 4294967295"),
        (["generate", "CHECKPOINT", "--prompt", "\udcff"], r"--prompt is '\udcff', allowed: text in the terminal's"),
        (["parity", "CHECKPOINT", "--flip-bit", "norm.weight:a:[b]"], "given 'norm.weight:a:[b]'"),
        (["calibrate", "CHECKPOINT", sys.executable, "new"], f"{sys.executable}: not UTF-8 text ("),
        (["calibrate", "CHECKPOINT", "README.md", "nowhere/new"], "nowhere/new: no such folder; make it, or choose"),
        (["generate", "CHECKPOINT", "--temperature", "-1"], "temperature is -1.0, allowed: 0 (greedy) or 0.01 to 100"),
        (["generate", "CHECKPOINT", "--devices", "3"], "allowed: 1, 2, 4 or 8"),
    ],
)
def test_bad_input_is_explained(checkpoint, arguments, message):
    err = muse(*[checkpoint if a == "CHECKPOINT" else a for a in arguments], code=2)
    assert message in err and "Traceback" not in err


def test_runtime_errors_are_explained(checkpoint):
    """A real one from the communicator, as on GPUs whose muse-jax was built without CUDA."""
    script = (
        "from muse_jax import _native, cli, comm\n"
        "def on_gpus(self, config, mesh):\n"
        "    self._config, self._mesh = config, mesh\n"
        "    self._open()\n"
        "_native.PLATFORMS = ('cpu',)\n"
        "comm.Communicator.__init__ = on_gpus\n"
        "cli.main()"
    )
    err = run("-c", script, "generate", checkpoint, code=2)
    assert err.startswith("muse-jax: this muse-jax was built without CUDA; reinstall it") and err.count("\n") == 1


def test_documents_name_only_what_exists():
    for document in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]:
        for name in re.findall(
            r"`((?:tests|docs|ffi|muse_jax|checkpoints|benchmarks)/[\w./*-]*)`", document.read_text()
        ):
            assert list(ROOT.glob(name.rstrip("/"))), f"{document.name} names {name}"


def test_generate_with_a_draft(checkpoint, tmp_path):
    """The text is the plain one; what is wrong with a draft's folder is said."""
    folder = write_tiny_draft(tmp_path / "draft")

    def text(*options):
        return muse("generate", checkpoint, "--max-new-tokens", 12, *options)

    plain, drafted = text(), text("--draft", folder, "--draft-width", 5)
    facts = [line for line in drafted.splitlines() if not line.startswith(("steps ", "accepted "))]
    assert facts == plain.splitlines() and "tokens each" in drafted
    assert re.search(r"accepted +(\d\.\d\d ){4}\(share of the steps", drafted)
    for options, message in (
        (("--draft", folder, "--draft-width", 9), "width"),
        (("--draft-width", 3), "--draft-width is of no use without --draft"),
    ):
        assert message in muse("generate", checkpoint, *options, code=2)
    (folder / "model.safetensors").unlink()
    assert "safetensors" in muse("generate", checkpoint, "--draft", folder, code=2)
