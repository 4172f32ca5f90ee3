"""Trains the target of the trained pair: a small Muse Spark, by the library's own expert-parallel reference.

    python checkpoints/train/target.py DATA OUT [--minutes 8] [--steps 3000]

DATA is what corpus.py made. A run ends before its time limit; the same command goes on, up to the last step. OUT gets
`model/`, our form with bf16 masters, as far as it has come, and the loop's own files (loop.py).

The forward pass is the exact one that decoding reproduces, NVFP4 experts quantised from their masters in every step;
gradients go straight through the quantisation. The optimiser's own copy of the weights is fp32. Experts' loads are
balanced without a loss of their own: a router's bias, which takes part in the choice only, moves by a fixed amount
towards the mean load.
"""

import argparse
import dataclasses
import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, PartitionSpec
from loop import Windows, add_arguments, settled, tell, train

from muse_jax import ops
from muse_jax.config import MuseSparkConfig
from muse_jax.config_hf import default_expert_formats, layer_pattern
from muse_jax.mesh import AXIS, make_mesh, replicated
from muse_jax.model import Reference
from muse_jax.tokenizer import load_tokenizer
from muse_jax.weights import Params, parameter_specs, save

BIAS = "e_score_correction_bias"
GATE = -0.2
"""Residual gates begin here: a branch has a third of the stream's size."""
EVALUATE_EVERY = 250


@dataclasses.dataclass(frozen=True)
class Recipe:
    """What a training is, beside its data and the model's shape."""

    steps: int = 3000
    batch: int = 32
    length: int = 1024
    """Tokens of a row, a multiple of 8."""
    learning_rate: float = 2e-3
    """At its largest, after `warmup` steps; it then falls along a cosine to a twentieth."""
    warmup: int = 100
    weight_decay: float = 0.1
    """Of matrices."""
    bias_step: float = 1e-3
    seed: int = 0


def model_config(vocabulary: int) -> MuseSparkConfig:
    """12.7 million parameters, 19.8 MB with NVFP4 experts: every feature of the released model.

    Eight ranks want eight heads of keys, and the first and the last layer keep bf16 experts; with a drafter in 24 MB
    that leaves room for seven layers of width 256.
    """
    layers = 7
    layer_types, layer_rope_theta = layer_pattern(layers, 10000.0)
    return MuseSparkConfig(
        vocab_size=vocabulary, hidden_size=256, num_hidden_layers=layers,
        num_attention_heads=8, num_key_value_heads=8, head_dim=64,
        moe_hidden_size=128, moe_intermediate_size=128, num_local_experts=16, num_experts_per_tok=4,
        routed_scaling_factor=1.0, rms_norm_eps=1e-5, post_norm_eps=1e-8, qk_scale_factor=5.4730064863875,
        output_multiplier=1.0, final_logit_softcapping=20.0, residual_gate_temperature=0.3,
        sliding_window=128, layer_types=layer_types, layer_rope_theta=layer_rope_theta,
        max_position_embeddings=4096, bos_token_id=0, eos_token_ids=(1,), pad_token_id=2,
        expert_formats=default_expert_formats(layers),
    )  # fmt: skip


class Trainer:
    """State and steps of one training. The state: `masters`, fp32 by name, and the optimiser's `moments`."""

    def __init__(self, config: MuseSparkConfig, mesh: Mesh, recipe: Recipe, data: dict[str, np.ndarray]):
        """Puts the token ids onto the mesh.

        Args:
            config: the model; all of its experts are trained as masters.
            mesh: as of the reference.
            recipe: the settings.
            data: ids [N] of "train" and "held_out".

        Raises:
            ValueError: ids beyond the vocabulary, a length that is no multiple of 8, or too few ids.
        """
        if recipe.length % 8:
            raise ValueError(f"length: given {recipe.length}, allowed: multiples of 8, the ranks that share a row")
        for name, ids in data.items():
            if ids.max() >= config.vocab_size:
                raise ValueError(f"{name}: ids up to {ids.max()}, allowed: below the vocabulary, {config.vocab_size}")
        self.config, self.mesh, self.recipe = config, mesh, recipe
        self.specs = parameter_specs(config, ("bf16",) * config.num_hidden_layers)
        self.batches = Windows(len(data["train"]), recipe.length, recipe.batch, recipe.seed)
        held_out = Windows(len(data["held_out"]), recipe.length, min(recipe.batch, 16), recipe.seed)
        ids = {name: jax.device_put(rows.astype(np.int32), replicated(mesh)) for name, rows in data.items()}
        self._reference = Reference(config, mesh)
        rate = optax.warmup_cosine_decay_schedule(
            0.0, recipe.learning_rate, min(recipe.warmup, recipe.steps // 2), recipe.steps, recipe.learning_rate / 20
        )
        decayed = {name: len(spec.shape) > 1 for name, spec in self.specs.items() if not name.endswith(BIAS)}
        self._optimiser = optax.chain(
            optax.clip_by_global_norm(1.0),
            optax.adamw(rate, b2=0.95, weight_decay=recipe.weight_decay, mask=decayed),
        )
        places = self._places(jax.eval_shape(self._initial))
        self.initial = jax.jit(self._initial, out_shardings=places)
        step = jax.jit(self._step, donate_argnums=1, out_shardings=(places, None))
        self.step = functools.partial(step, ids["train"])
        self.evaluate = functools.partial(jax.jit(self._evaluate), ids["held_out"], held_out(0))

    def params(self, state: Any) -> Params:
        """The model's parameters: bf16 masters as the forward pass sees them."""
        rounded = jax.jit(self._rounded, out_shardings={n: spec.sharding(self.mesh) for n, spec in self.specs.items()})
        return rounded(state["masters"])

    def _places(self, tree: Any) -> Any:
        """Shardings: of what belongs to a parameter, its own."""

        def place(path: Any, _: Any) -> Any:
            spec = self.specs.get(getattr(path[-1], "key", ""))
            return replicated(self.mesh) if spec is None else spec.sharding(self.mesh)

        return jax.tree_util.tree_map_with_path(place, tree)

    def _initial(self) -> dict[str, Any]:
        keys = jax.random.split(jax.random.key(self.recipe.seed), len(self.specs))
        masters = {
            name: _initial(name, spec.shape, key) for (name, spec), key in zip(self.specs.items(), keys, strict=True)
        }
        return {"masters": masters, "moments": self._optimiser.init(_learned(masters))}

    def _rounded(self, masters: Params) -> Params:
        return {name: w.astype(self.specs[name].dtype) for name, w in masters.items()}

    def _loss(self, masters: Params, tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Mean -log-probability of the tokens from a row's second on; loads fp32 [L, E], 1 where they are even."""
        taps = self._reference.taps(self._rounded(masters), tokens)
        by_token = PartitionSpec(None, AXIS)
        log_prob = jax.shard_map(
            ops.log_prob, mesh=self.mesh, in_specs=by_token, out_specs=by_token, check_vma=False
        )(taps["logits"], jnp.roll(tokens, -1, axis=1))  # fmt: skip
        chosen = [taps[f"layers.{layer}.router_experts"] for layer in range(self.config.num_hidden_layers)]
        experts = jnp.arange(self.config.num_local_experts)
        loads = jnp.stack([jnp.mean(experts[:, None] == ids.reshape(1, -1), axis=1) for ids in chosen])
        return -jnp.mean(log_prob[:, :-1]), loads * len(experts)

    def _step(
        self, ids: jax.Array, state: dict[str, Any], starts: jax.Array
    ) -> tuple[dict[str, Any], dict[str, jax.Array]]:
        masters, tokens = state["masters"], self._rows(ids, starts)
        (loss, loads), gradient = jax.value_and_grad(self._loss, has_aux=True)(masters, tokens)
        learned, gradient = _learned(masters), _learned(gradient)
        change, moments = self._optimiser.update(gradient, state["moments"], learned)
        updated: Any = optax.apply_updates(learned, change)
        for layer in range(self.config.num_hidden_layers):
            name = f"layers.{layer}.mlp.gate.{BIAS}"
            updated[name] = masters[name] + self.recipe.bias_step * jnp.sign(1 - loads[layer])
        metrics = {"loss": loss, "gradient": optax.tree.norm(gradient), "largest_load": jnp.max(loads)}
        return {"masters": updated, "moments": moments}, metrics

    def _evaluate(self, ids: jax.Array, starts: jax.Array, state: dict[str, Any]) -> dict[str, jax.Array]:
        return {"held_out": self._loss(state["masters"], self._rows(ids, starts))[0]}

    def _rows(self, ids: jax.Array, starts: jax.Array) -> jax.Array:
        return ids[starts[:, None] + jnp.arange(self.recipe.length)]


def _learned(masters: Params) -> Params:
    """What has a gradient."""
    return {name: w for name, w in masters.items() if not name.endswith(BIAS)}


def _initial(name: str, shape: tuple[int, ...], key: jax.Array) -> jax.Array:
    if name.endswith("residual_gate.gate"):
        return jnp.full(shape, GATE, jnp.float32)
    if len(shape) == 1:  # gains are stored minus one, but for the last
        return jnp.full(shape, 1.0 if name == "norm.weight" else 0.0, jnp.float32)
    deviation = {"embed_tokens.weight": 0.2, "lm_head.weight": 0.02}
    return (deviation[name] if name in deviation else shape[-1] ** -0.5) * jax.random.normal(key, shape)


def main() -> None:
    """Trains for a while."""
    parser = argparse.ArgumentParser(description="Trains a small Muse Spark on the token ids that corpus.py made.")
    parser.add_argument("data", type=Path, help="folder that corpus.py made")
    add_arguments(parser, Recipe)
    args = parser.parse_args()
    recipe, tokenizer = settled(args, Recipe), load_tokenizer(args.data)
    data = {name: np.load(args.data / f"{name}.npy") for name in ("train", "held_out")}
    trainer = Trainer(model_config(tokenizer.get_vocab_size()), make_mesh(), recipe, data)
    tokens = recipe.batch * recipe.length
    print(f"{recipe.steps} steps of {tokens:,} tokens, {trainer.batches.per_epoch} per epoch", flush=True)
    state, done = train(
        args.out, trainer.initial(), trainer.step, trainer.batches, steps=recipe.steps, minutes=args.minutes,
        tokens=tokens, evaluate=trainer.evaluate, evaluate_every=EVALUATE_EVERY,
    )  # fmt: skip
    save(args.out / "model", trainer.config, trainer.params(state), tokenizer, overwrite=True)
    tell(args.out / "model", done, recipe.steps)


if __name__ == "__main__":
    main()
