"""checkpoints/train/drafter.py: its forward is the library's, and a training in several runs has the bits of one."""

import csv
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from train_helpers import TARGET

from muse_jax import LanguageModel, load_draft, weights
from muse_jax.mesh import make_mesh
from muse_jax.speculative import DFlashConfig
from muse_jax.speculative import dflash_reference as reference
from muse_jax.speculative.dflash_model import draft_specs, empty_context
from muse_jax.speculative.dflash_weights import random_draft

pytest.importorskip("matplotlib")

import blocks
import drafter
import loop

CONFIG = DFlashConfig(
    vocab_size=64, hidden_size=128, num_attention_heads=8, num_key_value_heads=2, head_dim=16, intermediate_size=128,
    windows=(12, 12), rope_theta=10000.0, rms_norm_eps=1e-5, tap_layers=(0, 1), mask_token_id=2,
    output_multiplier=TARGET.output_multiplier, final_logit_softcapping=20.0, block_width=6, top_k=6,
    selector_rank=16, conv_group_size=16,
)  # fmt: skip
RECIPE = drafter.Recipe(steps=10, batch=2, anchors=8, learning_rate=1e-2, warmup=2)
TEXTS = {"train": np.tile(np.arange(3, 43, dtype=np.uint16), (6, 1)), "held_out": np.tile(np.arange(3, 43), (2, 1))}
TEXTS = {name: np.stack([np.roll(row, i) for i, row in enumerate(rows)]) for name, rows in TEXTS.items()}


@pytest.fixture(scope="module")
def trainer():
    mesh = make_mesh(8)
    params = weights.random_params(TARGET, 1, mesh, quantized=True)
    return drafter.Trainer(CONFIG, TARGET, params, mesh, RECIPE, TEXTS)


def test_forward_is_the_librarys(trainer):
    """Hidden states and pair scores of several blocks of a text, within bf16's roundings of what is used to draft."""
    rng = np.random.default_rng(3)
    table, head = (jnp.asarray(rng.normal(size=(64, 128)), jnp.bfloat16) for _ in range(2))
    params = random_draft(CONFIG, jax.random.key(0), table, head / 8).params
    wide = {name: w.astype(jnp.float32) for name, w in params.items()}
    features = jnp.asarray(rng.normal(size=(1, 48, 2, 128)), jnp.bfloat16)
    tokens, anchors = rng.integers(3, 64, (1, 48)).astype(np.int32), [20, 40]
    within = np.array(anchors)[:, None] + np.arange(6)
    block = tokens[0][within][None]
    rows = table[np.where(np.arange(6) > 0, 2, block)]
    found = jax.jit(blocks.hidden_states, static_argnums=0)(CONFIG, wide, features, rows, jnp.asarray([anchors]))
    expected_loss, runs = 0.0, []
    for i, anchor in enumerate(anchors):
        context = empty_context(CONFIG, 1, 64)
        for start in range(0, anchor, 20):  # as much as a ring holds beside a block
            count = min(20, anchor - start)
            part = features[:, start : start + count]
            context = reference.inject(CONFIG, params, context, part, np.array([count]), np.array([start]))
        hidden = reference.hidden_states(CONFIG, params, context, rows[:, i], np.array([anchor]))
        difference = np.asarray(found[:, i]) - hidden.astype(np.float32)
        assert np.sqrt(np.mean(difference**2)) < 0.03 * np.sqrt(np.mean(hidden.astype(np.float32) ** 2)), anchor

        right = True
        for t in range(1, 6):
            here, token, last = hidden[:, t : t + 1], block[0, i, t], block[0, i, t - 1 : t]
            logits = reference.target_logits(CONFIG, here, head / 8)
            ids = reference.candidates(CONFIG, reference.raw_logits(here, head / 8))
            scores = reference.pair_scores(CONFIG, params, here, logits, ids, last)
            choice = reference.log_softmax(scores)[0, 0, 0]
            loss = float(np.log(np.exp(logits[0, 0]).sum()) - logits[0, 0, token])
            loss -= float(choice[ids[0, 0] == token].sum())  # nothing where it is no candidate
            expected_loss += loss * np.exp(-(t - 1) / blocks.DECAY) / np.exp(-np.arange(5) / blocks.DECAY).sum() / 2
            right = right and bool(ids[0, 0, np.argmax(choice)] == token)
            runs.append(right)
    loss, accepted = jax.jit(blocks.block_loss, static_argnums=0)(CONFIG, wide, head / 8, found, jnp.asarray(block))
    assert abs(float(loss) - expected_loss) < 0.02 * expected_loss, (float(loss), expected_loss)
    assert float(accepted) == pytest.approx(1 + sum(runs) / 2)


@pytest.mark.slow
def test_runs_of_one_training(trainer, tmp_path):
    """However often it was stopped, every byte is that of one run; it learns; `load_draft` reads what it writes."""

    def run(folder, minutes=60.0):
        return loop.train(
            folder, trainer.initial(), trainer.step, trainer.batches, steps=RECIPE.steps, minutes=minutes, tokens=80,
            evaluate=trainer.evaluate, evaluate_every=5,
        )  # fmt: skip

    whole, done = run(tmp_path / "whole")
    assert done == RECIPE.steps
    assert run(tmp_path / "parts", minutes=0)[1] == 1
    state, done = run(tmp_path / "parts")
    assert done == RECIPE.steps
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(np.asarray(a), np.asarray(b)), whole, state)
    logs = [(tmp_path / name / "log.csv").read_text() for name in ("whole", "parts")]
    assert logs[0] == logs[1]
    rows = list(csv.DictReader(logs[0].splitlines()))
    assert float(rows[-1]["held_out"]) < float(rows[0]["loss"]) / 3, logs[0]
    assert float(rows[-1]["held_out_accepted"]) > 2 > float(rows[0]["accepted"]), logs[0]

    assert trainer.step.func._cache_size() == 1
    drafter.save_draft(tmp_path / "model", CONFIG, TARGET, trainer.draft(state))
    model = LanguageModel(TARGET, weights.random_params(TARGET, 1, trainer.mesh, quantized=True), trainer.mesh)
    draft = load_draft(tmp_path / "model", model)
    assert draft.config == CONFIG and draft.params.keys() == draft_specs(CONFIG).keys()
    for name, w in draft.params.items():
        np.testing.assert_array_equal(np.asarray(w), np.asarray(state["masters"][name].astype(jnp.bfloat16)))


def test_blocks_of_a_step(trainer):
    """Rows of the texts, and different places in each, of which all come up, with a whole block behind them."""
    seen = set()
    for step in range(20):
        rows, anchors = trainer.batches(step)
        assert set(rows) <= set(range(6)) and anchors.shape == (2, 8)
        assert all(len(set(row)) == 8 for row in anchors)
        seen |= set(anchors.ravel().tolist())
    assert seen == set(range(1, 40 - 6 + 1))
    np.testing.assert_array_equal(trainer.batches(3)[1], trainer.batches(3)[1])
    with pytest.raises(ValueError, match="anchors: given 35, allowed for texts of 40 tokens: 1 to 34"):
        drafter.Trainer(CONFIG, TARGET, {}, trainer.mesh, dataclasses.replace(RECIPE, anchors=35), TEXTS)
