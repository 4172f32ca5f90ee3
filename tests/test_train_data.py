"""The training data of checkpoints/train: whose text it is, what is held out, and that no byte of it is lost."""

import importlib.machinery
import json
import shutil
import sys
import sysconfig
from pathlib import Path

import corpus
import numpy as np
import pytest

from muse_jax.tokenizer import load_tokenizer

LIBRARY = Path(sysconfig.get_paths()["stdlib"])
VOCABULARY = 512
SCRIPTS = Path(corpus.__file__).parent


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    """A small library with what must not come into the data: others' packages, a copy, and text that is not UTF-8."""
    folder = tmp_path_factory.mktemp("library")
    for package in ("asyncio", "email", "json", "encodings"):
        shutil.copytree(LIBRARY / package, folder / package, ignore=shutil.ignore_patterns("__pycache__"))
    (folder / "site-packages").mkdir()
    (folder / "site-packages/other.py").write_text("licence = 'another'\n")
    shutil.copy(folder / "json/decoder.py", folder / "copy.py")
    (folder / "latin.py").write_bytes(b"name = '\xe9'\n")
    (folder / "names.py").write_text("text = '<bos> é 漢 <eos>'\n", encoding="utf-8")
    return folder


def test_files_and_ids(library, tmp_path):
    """Every text is in exactly one split, comes back byte for byte from the ids, and all is the same a second time."""
    about = corpus.make(tmp_path / "one", library, VOCABULARY)
    corpus.make(tmp_path / "two", library, VOCABULARY)
    for name in ("tokenizer.json", "train.npy", "held_out.npy", "data.json"):
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes(), name
    assert json.loads((tmp_path / "one/data.json").read_text()) == about

    tokenizer = load_tokenizer(tmp_path / "one")
    begin, end = (tokenizer.token_to_id(token) for token in ("<bos>", "<eos>"))
    assert tokenizer.get_vocab_size() == VOCABULARY
    found: dict[str, list[str]] = {}
    for name in ("train", "held_out"):
        ids = np.load(tmp_path / "one" / f"{name}.npy")
        assert ids.dtype == np.uint16 and ids.max() < VOCABULARY and ids[0] == begin and ids[-1] == end
        assert np.array_equal(np.flatnonzero(ids == begin)[1:], np.flatnonzero(ids == end)[:-1] + 1)
        texts = np.split(ids, np.flatnonzero(ids == end)[:-1] + 1)
        found[name] = [tokenizer.decode(row[1:-1].tolist(), skip_special_tokens=False) for row in texts]
    files = {file.read_bytes() for file in library.rglob("*.py")} - {(library / "latin.py").read_bytes()}
    files -= {(library / "site-packages/other.py").read_bytes()}
    expected = sorted(content.decode() for content in files if content.strip())
    assert sorted(found["train"] + found["held_out"]) == expected and not set(found["train"]) & set(found["held_out"])
    assert len(found["held_out"]) == about["held_out"]["files"] >= 2
    assert (library / "names.py").read_text(encoding="utf-8") in expected


def test_a_file_never_changes_sides(library):
    """Other files, other names and another order do not matter."""
    files = corpus.sources(library)
    train, held_out = map(set, corpus.split(files))
    fewer_train, fewer_held_out = map(set, corpus.split(files[::-2]))
    assert fewer_train < train and fewer_held_out <= held_out


def test_bad_input(library, tmp_path):
    texts, _ = corpus.split(corpus.sources(library))
    for vocabulary, says in ((258, "give 259 entries"), (60000, "what the texts have pieces for"), (70000, "uint16")):
        with pytest.raises(ValueError, match=says):
            corpus.train_tokenizer(texts, vocabulary)
    with pytest.raises(ValueError, match="needed: 1 of each"):
        corpus.make(tmp_path / "none", tmp_path, VOCABULARY)
    assert not (tmp_path / "none").exists()
    (tmp_path / "there").mkdir()
    with pytest.raises(FileExistsError, match="give the name of a folder to create"):
        corpus.make(tmp_path / "there", library, VOCABULARY)


def test_scripts_stand_for_no_other_module():
    """Scripts lie on the tests' path; one called like a folder there hid it, or not, by the order of the tests."""
    elsewhere = [entry for entry in sys.path if Path(entry).resolve() != SCRIPTS]
    names = [file.stem for file in SCRIPTS.glob("*.py")]
    assert "target" in names
    assert not [name for name in names if importlib.machinery.PathFinder.find_spec(name, elsewhere)]
