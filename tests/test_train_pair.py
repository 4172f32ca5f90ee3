"""The trained pair as a whole: its size, bytes of text, and (slow) every command from data to model card."""

import dataclasses
import math
import sys

import numpy as np
import pytest
from test_train_drafter import CONFIG as DRAFT
from train_helpers import TARGET

from muse_jax.speculative.dflash_model import draft_specs
from muse_jax.tokenizer import load_tokenizer
from muse_jax.weights import convert_checkpoint, parameter_specs

pytest.importorskip("matplotlib")

import card
import confidence
import corpus
import drafter
import target
import texts


def test_size():
    """Target and drafter fit, with their tokenizer and what is written beside them; the target has every feature."""
    config = target.model_config(4096)
    draft = drafter.draft_config(config)
    tokenizer, beside = 270_000, 250_000  # two plots, the card, headers of 160 arrays
    size = sum(spec.nbytes for specs in (parameter_specs(config), draft_specs(draft)) for spec in specs.values())
    assert 22_000_000 < size < card.LIMIT - tokenizer - beside, size
    count = sum(math.prod(spec.shape) for spec in parameter_specs(config, ("bf16",) * 7).values())
    assert count == 12_688_240
    assert set(config.layer_types) == {"full_attention", "sliding_attention"}
    assert config.moe_hidden_size < config.hidden_size and draft.is_v2 and draft.block_width == 16
    assert config.expert_formats == ("bf16", *("nvfp4",) * 5, "bf16")


def test_bytes_of_tokens():
    """Tokens of any text stand for all of its bytes, special ones for none."""
    text = "def decode(state):\n    return '\u00e9 \u6f22 <bos>'  # \U0001f600\n"
    tokenizer = corpus.train_tokenizer([text * 20], 280)
    size = card.token_bytes(tokenizer)
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    special = tokenizer.token_to_id("<bos>")
    assert size[special] == 0 and special in ids
    assert size[ids].sum() == len(text.encode()) - len("<bos>")


@pytest.mark.slow
def test_commands(tmp_path, monkeypatch, capsys):
    """Every command once, on a small model: the pair loads, decodes what was trained, and the card says so."""

    def run(module, *arguments):
        monkeypatch.setattr(sys, "argv", [module.__name__, *map(str, arguments)])
        module.main()
        return capsys.readouterr().out

    library = tmp_path / "library"
    library.mkdir()
    for number in range(120):
        lines = "".join(f"    value_{i} = {number} * {i} + {i * number % 17}\n" for i in range(30))
        (library / f"m{number}.py").write_text(f"def function_{number}():\n{lines}    return value_0\n")
    folder, runs, pair = tmp_path / "data", tmp_path / "runs", tmp_path / "pair"
    vocabulary = 320
    corpus.make(folder, library, vocabulary)
    small = TARGET.replace(vocab_size=vocabulary)
    monkeypatch.setattr(target, "model_config", lambda size: small.replace(vocab_size=size))
    monkeypatch.setattr(drafter, "draft_config", lambda config: dataclasses.replace(DRAFT, vocab_size=vocabulary))
    for name, value in (("BATCH", 6), ("HELD_OUT_ROWS", 6), ("LENGTH", 48), ("PROMPT", 16)):
        monkeypatch.setattr(texts, name, value)
    monkeypatch.setattr(card, "WIDTHS", (2, 6))
    monkeypatch.setattr(card, "NEW_TOKENS", 24)

    settings = ["--steps", 60, "--batch", 4, "--learning-rate", "5e-3", "--warmup", 5, "--minutes", 60]
    out = run(target, folder, runs / "target", *settings, "--length", 64)
    assert "after 60 of 60 steps, finished" in out and "tokens/s" in out
    with pytest.raises(SystemExit, match="an earlier run had other settings"):
        run(target, folder, runs / "target", *settings, "--length", 32)
    convert_checkpoint(runs / "target/model", pair / "target", to="orbax", quantize=True)
    assert "no time for batch 0 of 4" in run(
        texts, pair / "target", folder, runs / "texts", "--rows", 24, "--minutes", 0
    )
    assert "finished" in run(texts, pair / "target", folder, runs / "texts", "--rows", 24, "--minutes", 60)
    made = np.load(runs / "texts/train.npy")
    assert made.shape == (24, 48) and made.dtype == np.uint16
    out = run(drafter, pair / "target", runs / "texts", runs / "draft", *settings, "--anchors", 16)
    assert "after 60 of 60 steps, finished" in out
    out = run(confidence, pair / "target", runs / "texts", runs / "draft", "--prompts", 4)
    assert out.count("tokens per step") == 4 and sorted(p.name for p in (runs / "draft").glob("scaled*")) == ["scaled"]
    out = run(card, runs, folder, pair, "--rows", 4, "--length", 64, "--prompts", 6)
    assert out.count(" 0 of 252 log-probabilities differ") == 2
    text = (pair / "README.md").read_text()
    assert "0 of 504 log-probabilities differ" in text and f"Vocabulary: {vocabulary}" in text
    assert load_tokenizer(pair / "target").get_vocab_size() == vocabulary
    assert float(out.split("width 6: ")[1].split()[0]) > 1
    print(out, text)
