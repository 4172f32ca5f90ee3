"""The committed pair, checkpoints/pair: small, useful, and the same bits in training and decoding."""

import sysconfig
from pathlib import Path

import card
import corpus
import numpy as np
import pytest

import muse_jax

PAIR = Path(__file__).parents[1] / "checkpoints/pair"


@pytest.fixture(scope="module")
def model():
    return muse_jax.load(PAIR / "target", mesh=muse_jax.make_mesh())


@pytest.fixture(scope="module")
def held_out(model):
    """int32 [4, 128] of files of this Python that no pair is trained on, whatever the version."""
    library = Path(sysconfig.get_paths()["stdlib"])
    _, texts = corpus.split([file for name in ("email", "unittest") for file in corpus.sources(library / name)])
    ids = corpus.encode(model.tokenizer, texts).astype(np.int32)
    assert len(ids) >= 4 * 128
    return ids[: 4 * 128].reshape(4, 128)


def test_size_and_card():
    assert card.folder_bytes(PAIR) <= card.LIMIT
    assert " 0 of 693,594 log-probabilities differ" in (PAIR / "README.md").read_text()


def test_losses_are_equal(model, held_out):
    """Of the training path and of the decode path, token by token."""
    mean, differing = card.both_paths(model, model.params, held_out)
    assert differing == 0
    assert -4 < mean < -0.5  # it has learned Python


def test_draft_brings_tokens(model, held_out):
    """On other people's code, too; and the text is the plain one."""
    prompts = held_out[:4, :64].tolist()
    draft = muse_jax.load_draft(PAIR / "draft", model)
    out = muse_jax.generate(model, prompts, max_new_tokens=48, stop_ids=(), draft=draft)
    assert out.tokens == muse_jax.generate(model, prompts, max_new_tokens=48, stop_ids=()).tokens
    assert out.tokens_per_step is not None and out.tokens_per_step > 1.5
