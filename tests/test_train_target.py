"""checkpoints/train/target.py: a training in several runs has the bits of one, it learns, and loads are balanced."""

import csv
import dataclasses

import jax
import numpy as np
import pytest
from op_helpers import same
from train_helpers import TARGET

import muse_jax
from muse_jax import weights
from muse_jax.mesh import make_mesh
from muse_jax.model import Reference

pytest.importorskip("matplotlib")

import card
import loop
import target

RECIPE = target.Recipe(steps=12, batch=2, length=32, learning_rate=1e-2, warmup=2, bias_step=0.02)
DATA = {"train": np.tile(np.arange(3, 40, dtype=np.uint16), 20), "held_out": np.arange(100, dtype=np.uint16) % 37 + 3}


@pytest.fixture(scope="module")
def trainer():
    return target.Trainer(TARGET, make_mesh(8), RECIPE, DATA)


def run(trainer, folder, minutes=60.0):
    return loop.train(
        folder, trainer.initial(), trainer.step, trainer.batches, steps=RECIPE.steps, minutes=minutes, tokens=64,
        evaluate=trainer.evaluate, evaluate_every=6,
    )  # fmt: skip


def test_runs_of_one_training(trainer, tmp_path):
    """However often it was stopped, every byte of state and log is that of one run; it learns."""
    whole, done = run(trainer, tmp_path / "whole")
    assert done == RECIPE.steps
    for expected in (1, 2):  # there is never time for a second step
        _, done = run(trainer, tmp_path / "parts", minutes=0)
        assert done == expected
    state, done = run(trainer, tmp_path / "parts")
    assert done == RECIPE.steps
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(np.asarray(a), np.asarray(b)), whole, state)
    assert jax.tree.map(lambda x: x.sharding, whole) == jax.tree.map(lambda x: x.sharding, state)
    logs = [(tmp_path / name / "log.csv").read_text() for name in ("whole", "parts")]
    assert logs[0] == logs[1]
    rows = list(csv.DictReader(logs[0].splitlines()))
    assert [row["step"] for row in rows] == [str(step) for step in range(1, RECIPE.steps + 1)]
    assert float(rows[0]["loss"]) > 3.9 and float(rows[-1]["loss"]) < 1 and float(rows[-1]["held_out"]) < 1
    assert [bool(row["held_out"]) for row in rows] == [step % 6 == 0 for step in range(1, RECIPE.steps + 1)]
    assert (tmp_path / "parts/loss.png").stat().st_size > 1000
    again, done = run(trainer, tmp_path / "whole", minutes=0)  # there is nothing left to do
    assert done == RECIPE.steps
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(np.asarray(a), np.asarray(b)), whole, again)
    assert trainer.step.func._cache_size() == 1  # whether the state is new, was restored, or comes from a step
    check_export(trainer, state, tmp_path)


def check_export(trainer, state, folder):
    """What was trained, what is read back quantised, and what decodes: the same logits; masters have moved."""
    masters, first = trainer.params(state), trainer.params(trainer.initial())
    for name in (f"layers.1.mlp.experts.{half}_proj" for half in ("gate_up", "down")):  # of the NVFP4 layer
        assert np.mean(np.asarray(masters[name]) != np.asarray(first[name])) > 0.9
    weights.save(folder / "masters", TARGET, masters)
    weights.convert_checkpoint(folder / "masters", folder / "quantized", to="orbax", quantize=True)
    model = muse_jax.load(folder / "quantized", mesh=trainer.mesh)
    assert model.params["layers.1.mlp.experts.down_proj"].dtype == np.uint8
    text = DATA["held_out"][:96].reshape(3, 32).astype(np.int32)
    same(model.reference(text), Reference(TARGET, trainer.mesh).forward(masters, text))
    mean, differing = card.both_paths(model, masters, text)
    assert differing == 0 and -0.2 < mean < 0
    assert card.both_paths(model, first, text)[1] > 80  # of 93: the comparison can fail


def test_loads_are_balanced(trainer):
    """A bias moves by the sign of what its expert has too little, until the loads are even again."""
    state = trainer.initial()
    names = [f"layers.{layer}.mlp.gate.e_score_correction_bias" for layer in range(2)]
    for name in names:
        state["masters"][name] = state["masters"][name].at[0].set(0.5)  # every token's choice
    biases = {name: np.asarray(state["masters"][name]) for name in names}
    tokens = DATA["train"][trainer.batches(0)[:, None] + np.arange(RECIPE.length)]
    taps = Reference(TARGET, trainer.mesh).taps(trainer.params(state), tokens)
    largest = []
    for step in range(25):
        state, metrics = trainer.step(state, trainer.batches(step))
        largest.append(float(metrics["largest_load"]))
        if step == 0:
            for layer, name in enumerate(names):
                count = np.bincount(np.asarray(taps[f"layers.{layer}.router_experts"]).ravel(), minlength=8)
                moved = biases[name] + np.float32(0.02) * np.sign(count.mean() - count).astype(np.float32)
                np.testing.assert_array_equal(np.asarray(state["masters"][name]), moved)
    assert largest[0] > 3 and max(largest[-3:]) < 2, largest


def test_rows_of_a_step():
    """Every id is seen once per epoch but for less than a row, in another order each time, asked in any order."""
    windows = loop.Windows(1000, 32, 4, seed=3)
    assert windows.per_epoch == 7
    epochs = [np.concatenate([windows(7 * epoch + step) for step in range(7)]) for epoch in (0, 1)]
    for starts in epochs:
        assert len(set(starts % 32)) == 1 and len(set(starts)) == 28 and starts.min() >= 0 and starts.max() <= 1000 - 32
    assert not np.array_equal(*epochs)
    np.testing.assert_array_equal(loop.Windows(1000, 32, 4, seed=3)(9), epochs[1][8:12])
    with pytest.raises(ValueError, match="needs 4 rows of 32 ids, given: 127 ids"):
        loop.Windows(127, 32, 4, seed=3)


def test_bad_input(trainer):
    with pytest.raises(ValueError, match="length: given 12, allowed: multiples of 8"):
        target.Trainer(TARGET, trainer.mesh, dataclasses.replace(RECIPE, length=12), DATA)
    with pytest.raises(ValueError, match="train: ids up to 70, allowed: below the vocabulary, 64"):
        target.Trainer(TARGET, trainer.mesh, RECIPE, {"train": np.arange(71), "held_out": DATA["held_out"]})
