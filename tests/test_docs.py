"""The documentation builds without a broken link, and what it says the library says is what the library says."""

import os
import re
import shutil
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


def build_site(folder, *options):
    command = [sys.executable, "-m", "mkdocs", "build", "--site-dir", folder, *options]
    return subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=300, env=os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    )


def test_site(tmp_path):
    """Builds without a warning, every public name has its place."""
    done = build_site(tmp_path / "site")
    assert done.returncode == 0, done.stderr[-3000:]
    page = (tmp_path / "site/api/muse_jax.html").read_text()
    # A function that is named like its module stands there as a member of it.
    assert [name for name in muse_jax.__all__ if not re.search(rf'id="muse_jax\.({name}\.)?{name}"', page)] == []
    assert 'id="muse_jax.LanguageModel.update"' in page


def test_broken_links_fail(tmp_path):
    """A link to no page, to no heading and an object that does not exist: mkdocs.yml makes each an error."""
    shutil.copytree(ROOT / "docs", tmp_path / "docs")
    with (tmp_path / "docs/limits.md").open("a") as page:
        page.write("\n\n[x](nowhere.md) [y](architecture.md#nothing)\n\n[muse_jax.Nothing][]\n")
    settings = (ROOT / "mkdocs.yml").read_text().replace("docs_dir: docs", f"docs_dir: {tmp_path / 'docs'}")
    (tmp_path / "mkdocs.yml").write_text(settings)
    done = build_site(tmp_path / "site", "--config-file", tmp_path / "mkdocs.yml")
    assert done.returncode == 1 and "Aborted with 3 warnings in strict mode" in done.stdout + done.stderr
    for broken in ("nowhere.md", "#nothing", "muse_jax.Nothing"):
        assert broken in done.stderr
