"""The documentation builds without a broken link, and what it says the library says is what the library says."""

import re
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from decode_helpers import make_model, small

import muse_jax
from muse_jax import decode

ROOT = Path(__file__).parents[1]
ROW = re.compile(r"^\| `(?P<asked>.+?)` \| `(?P<says>.+)` \|$", re.MULTILINE)


@pytest.fixture(scope="module")
def names():
    """What the page's code may use."""
    model = make_model(small(), 3)
    state, rows = model.state(), decode.chain_rows([1], [0], [0], 1)

    def logits(tokens):
        return decode.decode_step(model.weights, state, tokens)[0].logits

    return {
        "MuseSparkConfig": muse_jax.MuseSparkConfig,
        "decode": decode,
        "init_state": model.state,
        "jax": jax,
        "load": muse_jax.load,
        "make_mesh": muse_jax.make_mesh,
        "step": logits,
        "tokens": jnp.zeros([2, 1], jnp.int32),
        "loss": lambda stream: decode.run_head(model.weights, state, rows, stream).logits.sum(),
        "stream": jnp.zeros([1, model.config.hidden_size]),
    }


def promises():
    return ROW.findall((ROOT / "docs/limits.md").read_text())


def test_limits_page_has_rows():
    assert len(promises()) >= 12


@pytest.mark.parametrize(("asked", "says"), promises())
def test_limits(names, asked, says):
    with pytest.raises(Exception, match=re.escape(says)):
        eval(asked, names)


def test_site(tmp_path):
    """mkdocs is strict: a broken link, an unknown page or an object that does not exist ends it with an error."""
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--quiet", "--site-dir", tmp_path / "site"],
        cwd=ROOT, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    page = (tmp_path / "site/api/muse_jax.html").read_text()
    # A function that is named like its module stands there as a member of it.
    assert [name for name in muse_jax.__all__ if not re.search(rf'id="muse_jax\.({name}\.)?{name}"', page)] == []
    assert 'id="muse_jax.LanguageModel.update"' in page
