"""Decode inside your own program: a `lax.scan` of steps under one `jit`, its caches donated.

    python examples/decode_in_a_scan.py checkpoints/pair/target

The program below draws nothing and stops nowhere: it shows where your own code goes between two steps.
"""

import argparse
import functools
import sys

import jax

import muse_jax
from muse_jax.decode import DecodeState, DecodeWeights, decode_step

STEPS = 16


@functools.partial(jax.jit, donate_argnames="state")
def rollout(weights: DecodeWeights, state: DecodeState, token: jax.Array) -> tuple[DecodeState, jax.Array, jax.Array]:
    """The state after STEPS steps, the tokens [STEPS, B] and how sure the model was of each, float32 [STEPS, B]."""

    def one(carry, _):
        state, token = carry
        step, state = decode_step(weights, state, token)
        chosen = step.token  # greedy; or your own choice from step.logits
        sureness = jax.nn.softmax(step.logits).max(axis=-1)
        return (state, chosen), (chosen, sureness)

    (state, _), (tokens, sureness) = jax.lax.scan(one, (state, token), length=STEPS)
    return state, tokens, sureness


def main() -> None:
    """Loads a checkpoint, decodes two prompts in one scan, compares with `generate`."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("checkpoint", help="folder: ours or Hugging Face's")
    model = muse_jax.load(parser.parse_args().checkpoint, mesh=muse_jax.make_mesh())
    if model.tokenizer is None:
        sys.exit("this checkpoint has no tokenizer; give token ids instead")
    prompts = [model.tokenizer.encode(text).ids for text in ("def decode(", "import ")]
    state = model.init_state(batch=2, capacity=64)
    step, state = model.prefill(state, prompts)
    first = step.token
    _, tokens, sureness = rollout(model.weights, state, first)
    out = muse_jax.generate(model, prompts, max_new_tokens=STEPS + 1, stop_ids=())
    for b, expected in enumerate(out.tokens):
        text = [int(first[b]), *(int(t) for t in tokens[:, b])]
        print(f"prompt {b}: {text}, mean certainty {float(sureness[:, b].mean()):.3f}")
        assert text == list(expected), "generate decodes other tokens"
    print("generate gives the same tokens")


if __name__ == "__main__":
    main()
