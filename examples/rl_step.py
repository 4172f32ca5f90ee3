"""Reinforcement learning whose sampler and trainer agree to the last bit: sample, score, update, repack, sample again.

    python examples/rl_step.py [CHECKPOINT] [--draft FOLDER] [--steps 20] [--save FOLDER]

Without a checkpoint it is the tiny model with random weights. The sampler is the fused decode step, speculative with a
draft; the trainer is the differentiable reference. Nothing corrects for a difference between their probabilities (no
importance weights, no clipping), because there is none: the exit code is 1 if one is ever seen. Layers that the
checkpoint holds as NVFP4 codes keep their experts; bf16 masters are trained through the quantisation.
"""

import argparse
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax

import muse_jax
from muse_jax.model import Reference
from muse_jax.tokenizer import byte_tokenizer
from muse_jax.weights import random_params, save

PROMPT = "def decode("
BATCH, NEW_TOKENS = 8, 8
LEARNING_RATE = 3e-4


def arguments() -> argparse.Namespace:
    """The command line's."""
    parser = argparse.ArgumentParser(description="Teaches a model to write letters, and compares every probability.")
    parser.add_argument("checkpoint", nargs="?", help="folder, with bf16 masters to train the experts too")
    parser.add_argument("--draft", help="folder of a DFlash draft: samples the same tokens in fewer steps")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--save", help="folder to create for the trained model")
    return parser.parse_args()


def load(path: str | None) -> muse_jax.LanguageModel:
    """The checkpoint, or the tiny model."""
    mesh = muse_jax.make_mesh()
    if path is not None:
        return muse_jax.load(path, mesh=mesh)
    config = muse_jax.MuseSparkConfig.tiny()
    return muse_jax.LanguageModel(config, random_params(config, 0, mesh), mesh, byte_tokenizer())


def main() -> None:
    """Trains for some steps; exit code 1 if sampler and trainer ever disagree about a token."""
    args = arguments()
    model = load(args.checkpoint)
    tokenizer = model.tokenizer
    if tokenizer is None:
        sys.exit("this checkpoint has no tokenizer; copy its tokenizer.json into the folder")
    prompt = tokenizer.encode(PROMPT).ids
    texts = [tokenizer.decode([token]).strip() for token in range(model.config.vocab_size)]
    wanted = np.array([text.isascii() and text.isalpha() for text in texts])  # the reward: how many tokens are letters

    # The optimiser's own copy is fp32, or its small steps would vanish in bf16; the model gets it rounded.
    reference, optimiser = Reference(model.config, model.mesh), optax.rmsprop(LEARNING_RATE)
    dtypes = {name: w.dtype for name, w in model.params.items() if w.dtype in (jnp.bfloat16, jnp.float32)}
    fixed = {name: w for name, w in model.params.items() if name not in dtypes}
    places = {name: w.sharding for name, w in model.params.items() if name in dtypes}
    masters = {name: model.params[name].astype(jnp.float32) for name in dtypes}
    moments = optimiser.init(masters)

    def rounded(masters):
        return {name: w.astype(dtypes[name]) for name, w in masters.items()}

    def loss(masters, fixed, tokens, advantages):
        log_probs = reference.log_probs({**rounded(masters), **fixed}, tokens)[:, len(prompt) - 1 :]
        return -jnp.mean(advantages[:, None] * log_probs), log_probs

    @jax.jit
    def train(masters, moments, fixed, tokens, advantages):
        (_, log_probs), gradient = jax.value_and_grad(loss, has_aux=True)(masters, fixed, tokens, advantages)
        change, moments = optimiser.update(gradient, moments)
        masters = jax.lax.with_sharding_constraint(optax.apply_updates(masters, change), places)
        return masters, moments, rounded(masters), log_probs, optax.tree.norm(gradient)

    differs = False
    for step in range(1, args.steps + 1):
        # Loaded again in each step, because it shares the model's table and head.
        draft = muse_jax.load_draft(args.draft, model, width=8) if args.draft else None
        out = muse_jax.generate(
            model, [prompt] * BATCH, max_new_tokens=NEW_TOKENS, stop_ids=(), logprobs=0, draft=draft,
            sampling=muse_jax.Sampling(), keys=jax.random.split(jax.random.key(step), BATCH),
        )  # fmt: skip
        assert out.log_probs is not None  # asked for
        reward = wanted[np.array(out.tokens)].mean(axis=1)
        advantages = jnp.asarray((reward - reward.mean()) / (reward.std() + 1e-3), jnp.float32)
        tokens = jnp.asarray([[*prompt, *new] for new in out.tokens])
        masters, moments, params, log_probs, norm = train(masters, moments, fixed, tokens, advantages)
        model.update(params)  # into the decode layout, in place; nothing is compiled again

        difference = np.asarray(log_probs) - np.array(out.log_probs)
        kl = float(np.mean(np.expm1(difference) - difference))
        differs |= not np.array_equal(np.asarray(log_probs), np.array(out.log_probs))
        print(
            f"step {step:3}: reward {reward.mean():.3f}, max |log-prob of sampler - of trainer| "
            f"{float(np.abs(difference).max())}, KL {kl}, gradient norm {float(norm):.3f}, "
            f"{out.steps} decode steps, {tokenizer.decode(out.tokens[0])!r}"
        )
    if args.save is not None:
        save(args.save, model.config, model.params, tokenizer)
    print(f"sampler and trainer {'differ' if differs else 'agree to the last bit'} ({args.steps} steps)")
    sys.exit(differs)


if __name__ == "__main__":
    main()
