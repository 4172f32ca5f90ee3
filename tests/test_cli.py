"""The command line and the README's example, run as a user runs them."""

import os
import re
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dflash_helpers import settings, write

from muse_jax.config import MuseSparkConfig
from muse_jax.speculative import DFlashConfig
from muse_jax.speculative.dflash_weights import random_draft

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory):
    """JAX's persistent compilation cache, which saves these many processes from compiling the same programs anew."""
    folder = tmp_path_factory.mktemp("cache")
    os.environ |= {
        "JAX_COMPILATION_CACHE_DIR": str(folder),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }
    yield folder
    del os.environ["JAX_COMPILATION_CACHE_DIR"], os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"]


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
    assert re.search(r"custom calls per step +2 ", out) and re.search(r"guarantee +bitwise\n", out)
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
        muse("generate", checkpoint, *options, "--seed", 8, "--devices", 1),
    ]
    ids = [m.group(1).split() for out in outputs if (m := re.search(r"token ids +([\d ]+)", out))]
    assert len(ids) == 3 and ids[0] == ids[1] != ids[2]
    streamed = muse("generate", checkpoint, "--max-new-tokens", 40, "--stream", "--stop", "4", "--devices", 1)
    assert re.search(r"finished by +stop_string\n", streamed) and not streamed.startswith("prompt")
    rows = re.findall(r"│ (\d+) +│ .* │ -\d+\.\d{4} +│ \d+ -\d+\.\d{4}  \d+ -\d+\.\d{4} +│", outputs[0])
    assert rows == ids[0]


def test_parity(checkpoint):
    out = muse("parity", checkpoint, "--steps", 64)
    assert "differing bytes: 0 of" in out and "first difference" not in out


@pytest.mark.parametrize(
    ("name", "tap"),
    [
        ("layers.3.self_attn.o_proj.weight", "layers.3.post_attention_residual"),
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
        (["generate", "CHECKPOINT", "--max-new-tokens", "0"], "max_new_tokens is 0, allowed: whole numbers from 1 on"),
        (["generate", "CHECKPOINT", "--max-new-tokens", "5000"], "max_position_embeddings"),
        (["generate", "CHECKPOINT", "--top-k", "0"], "top_k is 0, allowed: whole numbers from 1 on"),
        (["generate", "CHECKPOINT", "--temperature", "-1"], "temperature is -1.0, allowed: 0 (greedy) or 0.01 to 100"),
        (["generate", "CHECKPOINT", "--logprobs", "99"], "logprobs is 99, allowed: 0"),
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


def test_readme_example(checkpoint, tmp_path):
    code = re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.S)
    assert code is not None
    script = tmp_path / "example.py"
    script.write_text(
        'import jax\njax.config.update("jax_num_cpu_devices", 8)\n'
        + code.group(1).replace("checkpoints/tiny", str(checkpoint))
        + "\nprint(len(out.tokens[0]), logits.shape)\n"
    )
    assert run(script).startswith("[")


def test_documents_name_only_what_exists():
    for document in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]:
        for name in re.findall(
            r"`((?:tests|docs|ffi|muse_jax|checkpoints|benchmarks)/[\w./*-]*)`", document.read_text()
        ):
            assert list(ROOT.glob(name.rstrip("/"))), f"{document.name} names {name}"


def test_generate_with_a_draft(checkpoint, tmp_path):
    """The text is the plain one; what is wrong with a draft's folder is said."""
    config = MuseSparkConfig.tiny()
    small = DFlashConfig(
        vocab_size=config.vocab_size, hidden_size=config.hidden_size, num_attention_heads=8, num_key_value_heads=2,
        head_dim=16, intermediate_size=128, windows=(12, None), rope_theta=1e4, rms_norm_eps=1e-5, tap_layers=(1, 3),
        mask_token_id=config.vocab_size - 1, output_multiplier=config.output_multiplier,
        final_logit_softcapping=20.0, block_width=8, top_k=6, selector_rank=8, conv_group_size=16,
    )  # fmt: skip
    shared = jnp.zeros((config.vocab_size, config.hidden_size), jnp.bfloat16)
    draft = random_draft(small, jax.random.key(0), shared, shared)
    settings_of = settings(small, num_target_layers=config.num_hidden_layers)
    folder = write(tmp_path / "draft", {n: np.asarray(a) for n, a in draft.params.items()}, settings_of)

    def text(*options):
        return muse("generate", checkpoint, "--max-new-tokens", 12, *options)

    plain, drafted = text(), text("--draft", folder, "--draft-width", 5)
    facts = [line for line in drafted.splitlines() if not line.startswith(("steps ", "accepted "))]
    assert facts == plain.splitlines() and "tokens each" in drafted
    assert re.search(r"accepted +(\d\.\d\d ){4}\(share of the steps", drafted)
    compared = muse("parity", checkpoint, "--steps", 12, "--draft", folder, "--draft-width", 5)
    assert re.search(r"differing bytes: 0 of [\d,]+ compared with plain decoding \(38 positions\)", compared)
    assert re.search(r"tokens +│ 152 +│ 0", compared)
    for options, message in (
        (("--draft", folder, "--draft-width", 9), "width"),
        (("--draft-width", 3), "--draft-width is of no use without --draft"),
    ):
        assert message in muse("generate", checkpoint, *options, code=2)
    (folder / "model.safetensors").unlink()
    assert "safetensors" in muse("generate", checkpoint, "--draft", folder, code=2)
