"""Bad input: every row of bad_inputs.py and of the files below is explained, and nothing is lost or left behind."""

from __future__ import annotations

import errno
import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from bad_inputs import ARGUMENTS, Row
from convert_helpers import file_of, rewrite
from decode_helpers import small, step
from dflash_helpers import V1
from typer.testing import CliRunner
from weight_helpers import tree

import muse_jax
from muse_jax import LanguageModel, cli, convert_checkpoint, load, load_draft, make_mesh, random_draft
from muse_jax.calibration import calibrate
from muse_jax.errors import CheckpointError, ProblemsError
from muse_jax.tokenizer import byte_tokenizer, load_tokenizer
from muse_jax.weights import convert, export_hf, random_params, save
from muse_jax.weights.orbax_io import OrbaxTarget
from muse_jax.weights.quantize import write_input_scales
from muse_jax.weights.safetensors_file import FileWriter
from muse_jax.weights.safetensors_io import INDEX_FILE

ROOT = pathlib.Path(__file__).parent.parent


class World:
    """A model, states in use, and its checkpoint in both forms."""

    def __init__(self, folder: pathlib.Path):
        config, mesh = small(max_position_embeddings=96), make_mesh(8)
        params = random_params(config, 5, mesh, quantized=True)
        self.model = LanguageModel(config, params, mesh, byte_tokenizer())
        self.bare = LanguageModel(config, params, mesh, weights=self.model.weights)
        self.masters = random_params(config, 5, mesh)
        self.weights = self.model.weights
        self.consumed = self.model.init_state(capacity=16)
        _, self.state = self.model.prefill(self.consumed, [3, 1, 4])
        self.two = self.model.init_state(batch=2, capacity=32)
        self.shared = [params[name] for name in ("embed_tokens.weight", "lm_head.weight")]
        self.draft_config = V1.replace(vocab_size=64, hidden_size=128, tap_layers=(0, 1), mask_token_id=62)
        self.draft = random_draft(self.draft_config, jax.random.key(0), *self.shared)
        self.ours, self.hf = folder / "ours", folder / "hf"
        save(self.ours, config, params, byte_tokenizer())
        export_hf(self.hf, config, params, byte_tokenizer(), max_shard_bytes=400_000)
        self.files = tree(folder)
        self._folder = folder
        self.logits = self.next_logits()

    def next_logits(self) -> bytes:
        """What the model says next: weights and caches are as they were if this is."""
        return np.asarray(step(self.model.weights, self.state, [5])[0].logits).tobytes()

    def copy(self, name: str) -> jax.Array:
        return jnp.copy(self.model.params[name])

    def deleted(self, name: str) -> jax.Array:
        gone = self.copy(name)
        gone.delete()
        return gone

    def check(self) -> None:
        assert self.model.weights is self.weights and self.next_logits() == self.logits
        assert not any(x.is_deleted() for x in (*jax.tree.leaves(self.two), *self.model.params.values()))
        assert tree(self._folder) == self.files


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    return World(tmp_path_factory.mktemp("world"))


# Files ---------------------------------------------------------------------------------------------------------------


def copied(kind: str, change):
    """Prepares a copy of a checkpoint at folder/model, with something changed."""

    def prepare(w, folder, patch):
        shutil.copytree(getattr(w, kind), folder / "model")
        change(folder / "model")

    return prepare


def setting(**values):
    """Changes config.json, wherever it has the key; null is as good as absent."""

    def change(model):
        file = model / "config.json"
        data = json.loads(file.read_text())
        for place in (data, data["text_config"]):
            for name, value in values.items():
                if name in place:
                    place[name] = value
        file.write_text(json.dumps(data))

    return change


def tensor(name: str, change):
    return lambda model: rewrite(file_of(model, name), change)


def written(name: str, content: bytes):
    return lambda model: (model / name).write_bytes(content)


def is_a_folder(name: str):
    def change(model):
        (model / name).unlink()
        (model / name).mkdir()

    return change


def is_a_pipe(name: str):
    def change(model):
        (model / name).unlink()
        os.mkfifo(model / name)

    return change


def cut(name: str):
    return lambda model: os.truncate(file_of(model, name), 300)


def chunk(model: pathlib.Path) -> pathlib.Path:
    return next(f for f in sorted((model / "params").rglob("*")) if f.is_file() and "c" in f.parts[-3:])


def flipped(model):
    file = chunk(model)
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


def full_disk(target, name):
    """Writing fails as it does on a full disk."""

    def prepare(w, folder, patch):
        def fail(*_, **__):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "piece")

        patch.setattr(target, name, fail)

    return prepare


def little_space(w, folder, patch):
    patch.setattr(convert.shutil, "disk_usage", lambda path: SimpleNamespace(free=1000))


def made(name: str):
    """Something of the user's is there already."""

    def prepare(w, folder, patch):
        (folder / name).mkdir()
        (folder / name / "mine").write_text("keep")

    return prepare


LMK = "model.language_model."
N = "norm.weight"
LOAD = [
    ("no-folder", None, "no such folder; check the path"),
    ("a-file", lambda w, f, p: (f / "model").write_text("x"), "no such folder; check the path"),
    (
        "empty", lambda w, f, p: (f / "model").mkdir(),
        "neither our params/ nor any *.safetensors in it; give the folder that holds the model's config.json",
    ),
    (
        "architecture", copied("hf", setting(model_type="llama")),
        "config.json: model_type: given 'llama', supported: 'muse_spark' or 'muse_spark_text'",
    ),
    ("config-missing-key", copied("hf", setting(hidden_size=None)), "hidden_size: missing; every Muse Spark config"),
    ("config-value", copied("ours", setting(head_dim=128)), "head_dim: given 128, allowed: 64"),
    ("config-json", copied("hf", written("config.json", b"{")), "not valid JSON ( ... download the file again"),
    ("config-is-a-folder", copied("hf", is_a_folder("config.json")), "Is a directory; check the path and its perm"),
    (
        "tensor-missing", copied("hf", tensor(N, lambda found: found.pop(LMK + N))),
        f"{LMK}{N}: missing, although model.safetensors.index.json says it is in this file",
    ),
    (
        "tensor-unknown", copied("hf", tensor(N, lambda found: found.update({LMK + "norm.bias": found[LMK + N]}))),
        f"{LMK}norm.bias: unexpected ... ",
    ),
    (
        "tensor-dtype", copied("hf", tensor(N, lambda found: found.update({LMK + N: np.ones(128, np.float32)}))),
        f"{LMK}{N}: expected bfloat16 [128], found float32 [128]",
    ),
    (
        "tensor-nan", copied("hf", tensor(N, lambda found: found[LMK + N].__setitem__(3, np.nan))),
        f"{LMK}{N}: expected finite numbers, found 1 other(s), the first one nan at [3]",
    ),
    ("file-cut-off", copied("hf", cut(N)), "cannot be read as safetensors ... "),
    ("file-is-a-pipe", copied("hf", is_a_pipe(INDEX_FILE)), f"{INDEX_FILE}: a pipe, which may never end"),
    (
        "weights-are-a-pipe", copied("hf", lambda m: is_a_pipe(file_of(m, N).name)(m)),
        "is not a file; download it again",
    ),
    ("tokenizer", copied("hf", written("tokenizer.json", b"{}")), "tokenizer.json: not a tokenizer ("),
    ("file-missing", copied("hf", lambda m: file_of(m, N).unlink()), "model-0000 ... missing ... "),
    ("index-json", copied("hf", written(INDEX_FILE, b"{")), f"{INDEX_FILE}: not valid JSON ("),
    ("chunk-missing", copied("ours", lambda m: chunk(m).unlink()), "missing ... copy the checkpoint again, or make it"),
    ("chunk-flipped", copied("ours", flipped), "copy the checkpoint again, or make it anew"),
]  # fmt: skip

TOKENIZERS = [
    (
        "none", None,
        "tokenizer.json: No such file or directory; copy the model's tokenizer.json there, or pass token ids instead "
        "of text",
    ),
    ("bytes", b"\xff", "tokenizer.json: not UTF-8 text; download the file again"),
    ("empty", b"{}", "tokenizer.json: not a tokenizer ("),
    ("json", b"{", "tokenizer.json: not a tokenizer ("),
]  # fmt: skip

CONVERT = [
    ("to", "ours", {"to": "gguf"}, "to: given 'gguf', allowed: 'orbax', 'hf', 'meta', or nothing", ValueError, None),
    (
        "rows", "hf", {"source_rows": "x"}, "source_rows: given 'x', allowed: 'hf', 'meta', or nothing", ValueError,
        None,
    ),
    (
        "rows-of-ours", "ours", {"source_rows": "hf"},
        "source_rows: given 'hf', but our own form has one order only", CheckpointError, None,
    ),
    (
        "scales", "ours", {"input_scales": "x"}, "input_scales: of no use without quantize", ValueError, None,
    ),
    (
        "foreign", "ours", {}, ".new.partial exists and is not what an earlier run left; move it, or choose another",
        CheckpointError, made(".new.partial"),
    ),
    (
        "foreign-file", "ours", {}, ".new.partial exists and is not what an earlier run left",
        CheckpointError, lambda w, f, p: (f / ".new.partial").write_text("keep"),
    ),
    (
        "foreign-beside", "ours", {}, ".new.partial exists and is not what an earlier run left",
        CheckpointError, lambda w, f, p: (made("new")(w, f, p), made(".new.partial")(w, f, p)),
    ),
    ("exists", "ours", {}, "exists already; choose another name, or remove it", CheckpointError, made("new")),
    (
        "no-space", "ours", {}, "expected 69 ... free bytes, found 1,000; free some or use another disk",
        CheckpointError, little_space,
    ),
]  # fmt: skip


def writes(name, function, says, prepare, error=CheckpointError):
    return Row(
        name, lambda w, folder: function(folder / "new", w.model.config, w.model.params), (says,), error, prepare
    )


def incomplete(path, config, params):
    return export_hf(path, config, {name: x for name, x in params.items() if name != N})


NO_SPACE = "[Errno 28] No space left on device: 'piece'; nothing is left of it"
FILES = [
    *(
        Row(f"load-{name}", lambda w, folder: load(folder / "model", mesh=w.model.mesh), (says,), CheckpointError, prep)
        for name, prep, says in LOAD
    ),
    Row(
        "load-decode-layout-alone", lambda w, folder: load(folder / "model", mesh=w.model.mesh, reference=False),
        ("missing ... copy the checkpoint again, or make it",), CheckpointError,
        copied("ours", lambda m: chunk(m).unlink()),
    ),
    *(
        Row(
            f"tokenizer-{name}", lambda w, folder: load_tokenizer(folder), (says,), CheckpointError,
            lambda w, folder, p, data=data: data is not None and (folder / "tokenizer.json").write_bytes(data),
        )
        for name, data, says in TOKENIZERS
    ),
    *(
        Row(
            f"convert-{name}",
            lambda w, folder, kind=kind, options=options: convert_checkpoint(
                getattr(w, kind), folder / "new", **options
            ),
            (says,), error, prepare,
        )
        for name, kind, options, says, error, prepare in CONVERT
    ),
    Row(
        "convert-nothing", lambda w, folder: convert_checkpoint(folder / "none", folder / "new"),
        ("no such folder; check the path",), CheckpointError,
    ),
    Row(
        "convert-below-a-file", lambda w, folder: convert_checkpoint(w.ours, folder / "file" / "new"),
        ("cannot write ... Not a directory ... nothing was written",), CheckpointError,
        lambda w, f, p: (f / "file").write_text("keep"),
    ),
    writes("save-exists", save, "exists already; choose another name, remove it, or pass overwrite=True", made("new")),
    writes("save-no-space", save, NO_SPACE, full_disk(OrbaxTarget, "write")),
    writes("export-exists", export_hf, "exists already; choose another name, remove it, or pass", made("new")),
    writes("export-no-space", export_hf, NO_SPACE, full_disk(FileWriter, "write")),
    writes("export-incomplete", incomplete, f"{N}: missing, expected bfloat16 [128]", None),
    Row(
        "scales-below-nothing",
        lambda w, folder: write_input_scales(folder / "none" / "new", {"x": np.ones(3, np.float32)}, {}),
        ("No such file or directory ... nothing is left of it",), CheckpointError,
    ),
    Row(
        "inspect-nothing", lambda w, folder: muse_jax.inspect_checkpoint(folder / "none"),
        ("no such folder; check the path",), CheckpointError,
    ),
    Row(
        "draft-nothing", lambda w, folder: load_draft(folder, w.model),
        ("no *.safetensors files", "config.json: No such file or directory; check the path and its permissions"),
        CheckpointError,
    ),
]  # fmt: skip

NO_PATH = [
    ("load", lambda w: load(None), "path: given None"),
    ("load-number", lambda w: load(3), "path: given 3"),
    ("load-params", lambda w: muse_jax.weights.load(None), "path: given None"),
    ("import", lambda w: muse_jax.weights.import_hf(None), "folder: given None"),
    ("restore", lambda w: muse_jax.weights.restore(None), "path: given None"),
    ("save", lambda w: save(None, w.model.config, w.model.params), "path: given None"),
    ("export", lambda w: export_hf(b"x", w.model.config, w.model.params), "folder: given b'x'"),
    ("inspect", lambda w: muse_jax.inspect_checkpoint(["x"]), "path: given ['x']"),
    ("convert-source", lambda w: convert_checkpoint(None, "new"), "source: given None"),
    ("convert-target", lambda w: convert_checkpoint(w.ours, None), "target: given None"),
    ("calibrate", lambda w: calibrate(None, "text"), "folder: given None"),
    ("draft", lambda w: load_draft(None, w.model), "path: given None"),
    ("tokenizer", lambda w: load_tokenizer(None), "folder: given None"),
    ("config", lambda w: muse_jax.MuseSparkConfig.from_hf(None), "source: given None"),
]
PATHS = [
    Row(f"path-{name}", lambda w, _, ask=ask: ask(w), (f"{says}, expected a path (a str or os.PathLike)",), TypeError)
    for name, ask, says in NO_PATH
]  # fmt: skip

# The command line ----------------------------------------------------------------------------------------------------


def never_loads(w, folder, patch):
    """What is wrong is found before a checkpoint of half a terabyte is loaded."""
    (folder / "draft").mkdir()
    patch.setattr(cli, "_prepare_cpu", lambda devices: None)  # this process has its devices already
    patch.setattr(cli, "load", lambda *_, **__: pytest.fail("the checkpoint was loaded"))


def command(name, *arguments, says, error=ValueError):
    def ask(w, folder):
        given = [str(folder / a) if a == "draft" else a for a in arguments]
        CliRunner().invoke(cli.app, [name, str(w.ours), *given], catch_exceptions=False)

    return Row(f"{name}{''.join(arguments[:1])}", ask, says, error, never_loads)


NO_DRAFT = ("no *.safetensors files; give the folder that holds the draft's", "config.json: No such file or directory")
COMMANDS = [
    command("generate", "--draft", "draft", says=NO_DRAFT, error=CheckpointError),
    command("parity", "--draft", "draft", says=NO_DRAFT, error=CheckpointError),
    command("generate", "--stop", "", says=("stop_strings holds '', allowed: texts that are not empty",)),
    command("generate", "--draft-width", "3", says=("--draft-width is of no use without --draft",)),
]

ROWS = [*ARGUMENTS, *FILES, *PATHS, *COMMANDS]


def test_there_are_rows():
    assert len({row.name for row in ROWS}) == len(ROWS)
    assert f"({len(ROWS)} mistakes," in (ROOT / "README.md").read_text()


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_row(world, tmp_path, monkeypatch, row):
    if row.prepare is not None:
        row.prepare(world, tmp_path, monkeypatch)
    before = tree(tmp_path)
    with pytest.raises(row.error) as caught:
        row.ask(world, tmp_path)
    monkeypatch.undo()
    text = str(caught.value)
    for says in row.says:
        assert re.search(".*".join(re.escape(part) for part in says.split(" ... ")), text, re.S), text
    if isinstance(caught.value, ProblemsError):
        assert len(caught.value.problems) == len(row.says), text
    world.check()
    assert tree(tmp_path) == before


def test_a_broken_tokenizer_is_found_by_looking(world, tmp_path):
    copied("ours", written("tokenizer.json", b"{}"))(world, tmp_path, None)
    (problem,) = muse_jax.inspect_checkpoint(tmp_path / "model").problems
    assert problem.startswith("tokenizer.json: not a tokenizer (")


def test_stop_strings_from_an_iterator(world):
    text = muse_jax.generate(world.model, [3, 1, 4], max_new_tokens=12).texts[0]
    stop = next(c for c in text[2:] if c != "\ufffd")
    found = muse_jax.generate(world.model, [3, 1, 4], max_new_tokens=12, stop_strings=iter([stop]))
    assert found.finish_reasons == ["stop_string"] and found.texts == [text.partition(stop)[0]]


# Ctrl-C --------------------------------------------------------------------------------------------------------------


def interrupted(patches: str, *arguments, wait_for) -> subprocess.CompletedProcess:
    """The command, stopped by SIGINT as soon as `wait_for()` says so."""
    # Who started these tests may ignore SIGINT (as shells have background jobs do), which processes inherit.
    listen = "import signal\nsignal.signal(signal.SIGINT, signal.default_int_handler)"
    script = f"{listen}\nimport sys, time\nfrom muse_jax import cli\n{patches}\nsys.argv[0] = 'muse-jax'\ncli.main()"
    command = [sys.executable, "-c", script, *map(str, arguments)]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 120
    while not wait_for(process) and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    return subprocess.CompletedProcess(command, process.returncode, out, err)


def test_ctrl_c_while_converting(world, tmp_path):
    """Says how to go on; the folder has its name only when the same command has ended."""
    slow = (
        "from muse_jax.weights.orbax_io import OrbaxTarget\nreal = OrbaxTarget.write\n"
        "OrbaxTarget.write = lambda *a: (time.sleep(0.05), real(*a))[1]"
    )
    journal = tmp_path / ".new.partial" / "journal.txt"
    done = interrupted(
        slow, "convert", world.hf, tmp_path / "new",
        wait_for=lambda _: journal.exists() and journal.read_bytes().count(b"\n") > 3,
    )  # fmt: skip
    assert done.returncode == 130 and "Traceback" not in done.stderr, done.stderr
    assert "stopped; the same command goes on with what is written" in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == [".new.partial"]
    convert_checkpoint(world.hf, tmp_path / "new")
    assert tree(tmp_path / "new") == tree(world.ours) and [path.name for path in tmp_path.iterdir()] == ["new"]
    world.check()


def test_ctrl_c_while_generating(world):
    """Ends soon, whatever the step is at, without a traceback."""
    slow = (
        "from muse_jax import GenerationStream as stream\nreal = stream._look\n"
        "stream._look = lambda self: (print('step', flush=True), time.sleep(0.5), real(self))[2]"
    )
    begin = time.monotonic()
    done = interrupted(
        slow, "generate", world.hf, "--prompt", "!", "--max-new-tokens", 80, "--devices", 1, "--stream",
        wait_for=lambda process: process.stdout.readline() == "step\n",
    )  # fmt: skip
    assert done.returncode == 130 and "Traceback" not in done.stderr, done.stderr
    assert "finished by" not in done.stdout and time.monotonic() - begin < 100
    world.check()
