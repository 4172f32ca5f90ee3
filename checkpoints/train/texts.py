"""The texts that the drafter learns from: what its target says after beginnings from the data.

    python checkpoints/train/texts.py TARGET DATA OUT [--minutes 8] [--rows 12288]

OUT gets `train.npy` and `held_out.npy`, uint16 [rows, 256]: 64 ids from the data, then the target's own, drawn at a
temperature of 0.7 in every fourth batch and chosen greedily in the others. Longer texts of a small model go round in
circles, which teach a drafter nothing: more beginnings do. A run ends before its time limit; the
same command goes on, and every batch is a function of its number.
"""

import argparse
import time
from pathlib import Path

import jax
import numpy as np
from loop import RESERVE, STARTED

import muse_jax

BATCH = 64
"""Texts at once: a decode step's rows."""
LENGTH, PROMPT = 256, 64
TEMPERATURE = 0.7
HELD_OUT_ROWS = BATCH


def continuations(
    model: muse_jax.LanguageModel, ids: np.ndarray, number: int, *, rows: int, length: int, prompt: int
) -> np.ndarray:
    """Batch `number` of texts.

    Args:
        model: the target.
        ids: [N], where the beginnings are taken from.
        number: from 0; 3, 7, ... are drawn, the others greedy.
        rows: of the batch, 1 to 64.
        length: ids of each text, those of the beginning included.
        prompt: ids of each beginning.

    Returns:
        uint16 [rows, length].
    """
    starts = np.random.default_rng((0, number)).integers(0, len(ids) - prompt, rows, endpoint=True)
    prompts = ids[starts[:, None] + np.arange(prompt)]
    sampled = {
        "sampling": muse_jax.Sampling(temperature=TEMPERATURE),
        "keys": jax.random.split(jax.random.key(number), rows),
    }
    out = muse_jax.generate(
        model, prompts.tolist(), max_new_tokens=length - prompt, stop_ids=(), **(sampled if number % 4 == 3 else {})
    )
    return np.concatenate([prompts, np.array(out.tokens)], axis=1).astype(np.uint16)


def main() -> None:
    """Makes texts for a while."""
    parser = argparse.ArgumentParser(description="Lets a target continue beginnings from the data.")
    parser.add_argument("target", type=Path, help="the quantised target's folder")
    parser.add_argument("data", type=Path, help="folder that corpus.py made")
    parser.add_argument("out", type=Path, help="folder, new or of an earlier run")
    parser.add_argument("--minutes", type=float, default=8, help="limit of this run, compilation counted")
    parser.add_argument("--rows", type=int, default=12288, help=f"texts to train on, in batches of {BATCH}")
    args = parser.parse_args()
    model = muse_jax.load(args.target)
    args.out.mkdir(parents=True, exist_ok=True)
    longest = 0.0
    for split, rows in (("held_out", HELD_OUT_ROWS), ("train", args.rows)):
        ids = np.load(args.data / f"{split}.npy")
        files = [args.out / f"{split}.{number:04}.npy" for number in range(-(-rows // BATCH))]
        for number, file in enumerate(files):
            if file.exists():
                continue
            begin = time.monotonic()
            if begin - STARTED + 2 * longest + RESERVE > 60 * args.minutes and longest:
                print(f"no time for batch {number} of {len(files)}; the same command goes on")
                return
            batch = continuations(model, ids, number, rows=BATCH, length=LENGTH, prompt=PROMPT)
            partial = file.with_suffix(".partial.npy")
            np.save(partial, batch)
            partial.replace(file)
            longest = max(longest, time.monotonic() - begin)
            now = time.monotonic()
            rate, minutes = BATCH * (LENGTH - PROMPT) / (now - begin), (now - STARTED) / 60
            print(f"{minutes:.1f} min, {split} {number + 1} of {len(files)}: {rate:,.0f} tokens/s", flush=True)
        np.save(args.out / f"{split}.npy", np.concatenate([np.load(file) for file in files]))
    print(f"{args.out}: finished")


if __name__ == "__main__":
    main()
