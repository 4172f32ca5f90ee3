"""Every command and Python block of the documents: run, with the output that is shown, or listed with the reason."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from dflash_helpers import write_tiny_draft
from typer.testing import CliRunner

from muse_jax.cli import app

ROOT = Path(__file__).parents[1]
DOCUMENTS = [
    "checkpoints/README.md",
    "README.md",
    "CHANGELOG.md",
    *(f"docs/{p.name}" for p in (ROOT / "docs").glob("*.md")),
]
NOT_HERE = {
    r"make (test|test-gpu|test-slow|docs|cuda-archs)": "by whoever runs these tests, on GPUs, with nvcc",
    r"python benchmarks/\w+\.py.*": "needs an H200",
    r"python checkpoints/train/(corpus|target|texts|drafter|confidence|card)\.py .*": "tests/test_train_pair.py, small",
    r"muse-jax convert RUNS/.*": "the same test does what this does",
    r'pip install "muse-jax\[train\]"': "what it brings is there",
    r"pip install -C cmake\.define\.MUSE_TIMELINE=ON \.": "builds the CUDA module",
}
VARIES = [  # with the machine, and no promise
    (r"(versions +|built for +|GPU peers +).*", r"\1"),
    (r"[\d.]+ [GM]B left", "left"),
]
LINE = re.compile(r"^(?:make|python|pip|muse-jax) \S")


def fenced(text: str, language: str) -> list[str]:
    return [block for kind, block in re.findall(r"^```(\w*)\n(.*?)^```$", text, re.S | re.M) if kind == language]


def shown(document: str) -> list[tuple[str, str]]:
    """(command, the output that is shown or "") of the blocks; a comment behind a command is left out."""
    found = []
    for block in fenced((ROOT / document).read_text(), ""):
        for part in re.split(r"^(?=\$ )|\n\n", block, flags=re.M):
            first, _, rest = part.strip("\n").partition("\n")
            lines = [(first[2:], rest)] if first.startswith("$ ") else [(line, "") for line in part.splitlines()]
            found += [(re.sub(r"\s+#.*", "", line), output) for line, output in lines if LINE.match(line)]
    return found


def named(document: str) -> list[str]:
    """Commands in the text itself."""
    text = re.sub(r"^```.*?^```", "", (ROOT / document).read_text(), flags=re.S | re.M)
    return [command for command in re.findall(r"`([^`\n]+)`", text) if LINE.match(command)]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Where the commands run; the checkpoints are what checkpoints/README.md makes there."""
    folder = tmp_path_factory.mktemp("commands")
    (folder / "checkpoints").mkdir()
    for name in ("make_tiny.py", "pair"):
        (folder / "checkpoints" / name).symlink_to(ROOT / "checkpoints" / name)
    for command, _ in shown("checkpoints/README.md"):
        if not_here(command):
            continue
        assert command.startswith("python checkpoints/make_tiny.py checkpoints/")
        python(*shlex.split(command)[1:], cwd=folder)
    assert sorted(p.name for p in (folder / "checkpoints").iterdir()) == ["make_tiny.py", "masters", "pair", "tiny"]
    write_tiny_draft(folder / "draft")
    (folder / "text").write_text("def decode(state, tokens):\n")
    return folder


def python(*arguments, cwd) -> str:
    """In a process of its own, with eight devices as the README says."""
    start = f"import sys; sys.path.insert(0, {str(ROOT)!r}); import jax; jax.config.update('jax_num_cpu_devices', 8); "
    start += "import runpy; sys.argv = sys.argv[1:]; runpy.run_path(sys.argv[0], run_name='__main__')"
    cache = {name: value for name, value in os.environ.items() if "_CACHE_" in name}
    done = subprocess.run(
        [sys.executable, "-c", start, *map(str, arguments)], cwd=cwd, capture_output=True, text=True, timeout=300,
        env={"PATH": "/usr/bin:/bin", "PJRT_NPROC": "64", "JAX_PLATFORMS": "cpu"} | cache,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def filled(command: str) -> list[str]:
    """The arguments of a muse-jax command, with something in every place that the document leaves to the reader."""
    bf16 = "calibrate" in command or "--quantize" in command
    words = shlex.split(re.sub(r"[\[\]]", "", command))[1:]
    given = {
        "CHECKPOINT": "checkpoints/masters" if bf16 else "checkpoints/tiny", "SCALES": "scales",
        "FOLDER": "draft" if "--draft" in words else "quantised" if bf16 else "converted",
        "TEXT": "text" if "calibrate" in words else "e",
    }  # fmt: skip
    return [given.get(word, word) for word in words]


def muse(command: str) -> str:
    """What a muse-jax command prints, here in this process; `| grep` is done too."""
    command, _, pattern = command.partition(" | grep ")
    with pytest.MonkeyPatch.context() as patch:  # this process has its devices already
        patch.setattr("muse_jax.cli._prepare_cpu", lambda devices: None)
        patch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
        done = CliRunner().invoke(app, filled(command))
    assert done.exit_code == (1 if "--flip-bit" in command else 0), (command, done.output, done.exception)
    lines = done.stdout.splitlines()
    return "\n".join(line for line in lines if not pattern or re.search(shlex.split(pattern)[0], line))


def promised(text: str) -> list[str]:
    for pattern, kept in VARIES:
        text = re.sub(pattern, kept, text)
    return text.splitlines()


def recipe(target: str) -> str:
    """The last command of a target of the Makefile, as `make` would run it."""
    command = ["make", "--no-print-directory", "-n", target]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout.splitlines()[-1]


def not_here(command: str) -> bool:
    return any(re.fullmatch(pattern, command) for pattern in NOT_HERE)


@pytest.mark.parametrize("document", DOCUMENTS)
def test_shown_commands(place, document, monkeypatch):
    """In their order. `make demo` is its last command; before it stands the installation."""
    monkeypatch.chdir(place)
    for command, output in shown(document):
        if command == "make demo":
            command = recipe("demo").removeprefix(".venv/bin/")
        if not_here(command) or command.startswith("python checkpoints/make_tiny.py"):
            continue
        assert command.startswith("muse-jax "), f"{document}: {command!r} is neither run nor in NOT_HERE"
        printed = muse(command)
        if output:
            assert promised(printed) == promised(output), command


@pytest.mark.parametrize("document", DOCUMENTS)
def test_named_commands(document):
    """Commands in the text: targets, scripts and subcommands that exist, and that are run somewhere."""
    for command in named(document):
        program, what, *_ = command.split()
        if program == "muse-jax":
            assert what in {c.name or c.callback.__name__ for c in app.registered_commands}, command
        elif command != "make demo":
            assert not_here(command), f"{document}: {command!r} is neither run nor in NOT_HERE"
        if program == "make":
            recipe(what)
        if program == "python":
            assert (ROOT / what).is_file(), command


def test_all_reasons_are_needed():
    commands = [command for d in DOCUMENTS for command in (*named(d), *(c for c, _ in shown(d)))]
    assert [p for p in NOT_HERE if not any(re.fullmatch(p, command) for command in commands)] == []


@pytest.mark.parametrize("document", [d for d in DOCUMENTS if fenced((ROOT / d).read_text(), "python")])
def test_python_blocks(place, document):
    """As scripts, in one process for each document."""
    script = place / "script.py"
    script.write_text("\n".join(fenced((ROOT / document).read_text(), "python")))
    python(script, cwd=place)


def test_other_languages_are_noticed():
    """A block in a language that nothing here runs."""
    for document in DOCUMENTS:
        assert {*re.findall(r"^```(\w+)", (ROOT / document).read_text(), re.M)} <= {"python"}, document
