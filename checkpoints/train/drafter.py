"""Trains the drafter of the trained pair: a small DFlash2 on its target's own features and continuations.

    python checkpoints/train/drafter.py TARGET TEXTS OUT [--minutes 8] [--steps 7000]

TARGET is the quantised target's folder, TEXTS what texts.py made with it. A run ends before its time limit; the same
command goes on, up to the last step. OUT gets `model/` in z-lab's published layout, as far as it has come, and the
loop's own files (loop.py).

In every step the reference runs the target, in inference's bits, and shows its residual stream after three layers to
blocks that begin at random places; each has to say the 15 tokens that come after its first. Table and head are the
target's and stay as they are.
"""

import argparse
import dataclasses
import functools
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from blocks import block_loss, hidden_states
from jax.sharding import Mesh
from loop import Windows, add_arguments, settled, tell, train
from safetensors.numpy import save_file

from muse_jax.config import MuseSparkConfig
from muse_jax.mesh import make_mesh, replicated
from muse_jax.model import Reference
from muse_jax.speculative import DFlashConfig
from muse_jax.speculative.dflash_config import default_tap_layers
from muse_jax.speculative.dflash_model import draft_specs
from muse_jax.weights import Params, load

EVALUATE_EVERY = 250


@dataclasses.dataclass(frozen=True)
class Recipe:
    """What a training is, beside its texts and the models' shapes."""

    steps: int = 7000
    batch: int = 32
    anchors: int = 32
    """Blocks in each text."""
    learning_rate: float = 2e-3
    """At its largest, after `warmup` steps; it then falls along a cosine to a tenth."""
    warmup: int = 200
    seed: int = 0


def draft_config(target: MuseSparkConfig) -> DFlashConfig:
    """1.7 million parameters, 3.5 MB: three layers, block 16, three tapped layers of the target."""
    return DFlashConfig(
        vocab_size=target.vocab_size, hidden_size=target.hidden_size,
        num_attention_heads=8, num_key_value_heads=2, head_dim=32, intermediate_size=256, windows=(256,) * 3,
        rope_theta=10000.0, rms_norm_eps=1e-5, tap_layers=default_tap_layers(target.num_hidden_layers, 3),
        mask_token_id=_mask(target), output_multiplier=target.output_multiplier,
        final_logit_softcapping=target.final_logit_softcapping,
        block_width=16, top_k=16, selector_rank=32, conv_group_size=16,
    )  # fmt: skip


def _mask(target: MuseSparkConfig) -> int:
    """The padding's row stands for what is to be predicted: no text has it."""
    if target.pad_token_id is None:
        raise ValueError("the target has no pad_token_id, whose row of the table the drafter's mask is")
    return target.pad_token_id


def published(config: DFlashConfig, target: MuseSparkConfig) -> dict[str, Any]:
    """config.json in z-lab's form, with one window for all layers."""
    return {
        "architectures": ["DFlash2DraftModel"], "model_type": "qwen3", "is_causal": False, "attention_bias": False,
        "hidden_act": "silu", "vocab_size": config.vocab_size, "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size, "head_dim": config.head_dim,
        "num_attention_heads": config.num_attention_heads, "num_key_value_heads": config.num_key_value_heads,
        "num_hidden_layers": config.num_layers, "num_target_layers": target.num_hidden_layers,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_parameters": {"rope_theta": config.rope_theta, "rope_type": "default"},
        "use_sliding_window": True, "sliding_window": config.windows[0],
        "layer_types": ["sliding_attention"] * config.num_layers,
        "dflash_config": {
            "block_size": config.block_width, "mask_token_id": config.mask_token_id, "conv_kernel_size": 2,
            "conv_group_size": config.conv_group_size, "selector_rank": config.selector_rank,
            "selector_top_k": config.top_k, "target_layer_ids": list(config.tap_layers),
            "output_multiplier": config.output_multiplier,
            "final_logit_softcapping": config.final_logit_softcapping,
        },
    }  # fmt: skip


class Trainer:
    """State and steps of one training. The state: `masters`, fp32 by name, and the optimiser's `moments`."""

    def __init__(
        self, config: DFlashConfig, target: MuseSparkConfig, params: Params, mesh: Mesh, recipe: Recipe,
        texts: dict[str, np.ndarray],
    ):  # fmt: skip
        """Puts the texts onto the mesh.

        Args:
            config: the draft's.
            target: the target's.
            params: the target's, on the mesh.
            mesh: as of the reference.
            recipe: the settings.
            texts: ids [rows, S] of "train" and "held_out".

        Raises:
            ValueError: texts that are no longer than a block, fewer of them than a step has, or with more places for
                blocks to begin wanted than they have.
        """
        self.config, self.mesh, self.recipe, self.length = config, mesh, recipe, texts["train"].shape[1]
        self._width, places = config.block_width, self.length - config.block_width
        if places < recipe.anchors:
            raise ValueError(
                f"anchors: given {recipe.anchors}, allowed for texts of {self.length} tokens: 1 to {max(places, 0)}"
            )
        self._params, self._reference = params, Reference(target, mesh)
        self._windows = Windows(texts["train"].size, self.length, recipe.batch, recipe.seed)
        held_out = texts["held_out"][: recipe.batch]
        ids = {name: jax.device_put(rows.astype(np.int32), replicated(mesh)) for name, rows in texts.items()}
        rate = optax.warmup_cosine_decay_schedule(
            0.0, recipe.learning_rate, min(recipe.warmup, recipe.steps // 2), recipe.steps, recipe.learning_rate / 10
        )
        self._optimiser = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(rate, b2=0.95, weight_decay=0.0))
        self.initial = jax.jit(self._initial, out_shardings=replicated(mesh))
        step = jax.jit(self._step, donate_argnums=2, out_shardings=(replicated(mesh), None))
        self.step = functools.partial(step, params, ids["train"])
        evaluate, anchors = jax.jit(self._evaluate), self._anchors(len(held_out), -1)
        self.evaluate = functools.partial(
            evaluate, params, (np.arange(len(held_out), dtype=np.int32), anchors), ids["held_out"]
        )

    def batches(self, step: int) -> tuple[np.ndarray, np.ndarray]:
        """Rows int32 [B] of the texts, and where their blocks begin, int32 [B, N]."""
        return self._windows(step) // self.length, self._anchors(self.recipe.batch, step)

    def draft(self, state: Any) -> Params:
        """The draft's parameters, bf16."""
        return {name: w.astype(jnp.bfloat16) for name, w in state["masters"].items()}

    def _anchors(self, batch: int, step: int) -> np.ndarray:
        # Position 0 has nothing before it.
        rng = np.random.default_rng((self.recipe.seed, 1, step + 1))
        places = np.tile(np.arange(1, self.length - self._width + 1, dtype=np.int32), (batch, 1))
        return rng.permuted(places, axis=1)[:, : self.recipe.anchors]

    def _initial(self) -> dict[str, Any]:
        specs = draft_specs(self.config)
        keys = jax.random.split(jax.random.key(self.recipe.seed), len(specs))
        masters = {name: _initial(name, spec.shape, key) for (name, spec), key in zip(specs.items(), keys, strict=True)}
        return {"masters": masters, "moments": self._optimiser.init(masters)}

    def _loss(
        self, masters: Params, params: Params, tokens: jax.Array, anchors: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        taps = self._reference.taps(params, tokens)
        layers = [taps[f"layers.{layer}.post_feedforward_residual"] for layer in self.config.tap_layers]
        features = jnp.stack(layers, axis=2).astype(jnp.bfloat16)
        rounded = {name: w.astype(jnp.bfloat16).astype(jnp.float32) for name, w in masters.items()}
        within = anchors[..., None] + jnp.arange(self._width)
        block = jnp.take_along_axis(tokens[:, None], within, axis=2)
        table = params["embed_tokens.weight"]
        rows = table[block.at[:, :, 1:].set(self.config.mask_token_id)]
        hidden = hidden_states(self.config, rounded, features, rows, anchors)
        return block_loss(self.config, rounded, params["lm_head.weight"], hidden, block)

    def _step(
        self, params: Params, ids: jax.Array, state: dict[str, Any], batch: tuple[jax.Array, jax.Array]
    ) -> tuple[dict[str, Any], dict[str, jax.Array]]:
        rows, anchors = batch
        masters = state["masters"]
        value, gradient = jax.value_and_grad(self._loss, has_aux=True)(masters, params, ids[rows], anchors)
        change, moments = self._optimiser.update(gradient, state["moments"], masters)
        metrics = {"loss": value[0], "accepted": value[1], "gradient": optax.tree.norm(gradient)}
        return {"masters": optax.apply_updates(masters, change), "moments": moments}, metrics

    def _evaluate(
        self, params: Params, batch: tuple[jax.Array, jax.Array], ids: jax.Array, state: dict[str, Any]
    ) -> dict[str, jax.Array]:
        rows, anchors = batch
        loss, accepted = self._loss(state["masters"], params, ids[rows], anchors)
        return {"held_out": loss, "held_out_accepted": accepted}


def _initial(name: str, shape: tuple[int, ...], key: jax.Array) -> jax.Array:
    """The convolution begins as the identity, the selector as no preference."""
    if name.endswith("norm.weight"):
        return jnp.ones(shape)
    if name.endswith("base_kernel"):
        return jnp.broadcast_to(jnp.array([1.0, 0.0])[:, None], shape)
    if name.endswith(("kernel_projection.weight", "successor_codebook")):
        return jnp.zeros(shape)
    return shape[-1] ** -0.5 * jax.random.normal(key, shape)


def save_draft(folder: Path, config: DFlashConfig, target: MuseSparkConfig, params: Params) -> None:
    """Writes what `muse_jax.load_draft` reads."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(published(config, target), indent=1) + "\n", encoding="utf-8")
    save_file({name: np.asarray(w) for name, w in params.items()}, folder / "model.safetensors")


def main() -> None:
    """Trains for a while."""
    parser = argparse.ArgumentParser(description="Trains a DFlash2 drafter on its target's features and continuations.")
    parser.add_argument("target", type=Path, help="the quantised target's folder")
    parser.add_argument("texts", type=Path, help="folder that texts.py made with it")
    add_arguments(parser, Recipe)
    args = parser.parse_args()
    recipe, mesh = settled(args, Recipe), make_mesh()
    target, params = load(args.target, mesh)
    texts = {name: np.load(args.texts / f"{name}.npy") for name in ("train", "held_out")}
    trainer = Trainer(draft_config(target), target, params, mesh, recipe, texts)
    tokens = recipe.batch * trainer.length
    print(f"{recipe.steps} steps of {recipe.batch * recipe.anchors} blocks in {tokens:,} tokens", flush=True)
    state, done = train(
        args.out, trainer.initial(), trainer.step, trainer.batches, steps=recipe.steps, minutes=args.minutes,
        tokens=tokens, evaluate=trainer.evaluate, evaluate_every=EVALUATE_EVERY,
    )  # fmt: skip
    save_draft(args.out / "model", trainer.config, target, trainer.draft(state))
    tell(args.out / "model", done, recipe.steps)


if __name__ == "__main__":
    main()
