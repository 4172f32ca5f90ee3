"""Check inference against training on your own weights: every tap of every layer, then the log-probabilities.

python examples/check_numerics.py checkpoints/pair/target "def decode("
"""

import argparse
import sys

import jax.numpy as jnp

import muse_jax


def main() -> None:
    """Loads a checkpoint, compares the fused decode with the reference on a text; exit code 1 if a byte differs."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("checkpoint", help="folder: ours or Hugging Face's")
    parser.add_argument("text", nargs="?", default="def decode(")
    args = parser.parse_args()
    model = muse_jax.load(args.checkpoint, mesh=muse_jax.make_mesh())
    if model.tokenizer is None:
        sys.exit("this checkpoint has no tokenizer; give token ids instead")
    ids = model.tokenizer.encode(args.text).ids

    report = muse_jax.parity(model, ids, steps=8)
    for tap in report.taps:
        if tap.differing_bytes:
            print(f"{tap.tap}: {tap.differing_bytes:,} of {tap.bytes:,} bytes differ")
    print(f"differing bytes: {report.differing_bytes:,} of {report.bytes:,}, {len(report.taps)} taps")
    print(f"guarantee: {report.guarantee}")

    # What a trainer computes of a sampled text, against what the sampler said when it chose it.
    out = muse_jax.generate(model, ids, max_new_tokens=8, stop_ids=(), logprobs=1)
    text = [*ids, *out.tokens[0]]
    trainer = model.log_probs([text])[0, len(ids) - 1 :]
    assert out.log_probs is not None  # asked for
    worst = float(jnp.abs(trainer - jnp.asarray(out.log_probs[0])).max())
    print(f"max |log-probability of the trainer - of the sampler|: {worst}")
    sys.exit(report.differing_bytes > 0 or worst > 0)


if __name__ == "__main__":
    main()
