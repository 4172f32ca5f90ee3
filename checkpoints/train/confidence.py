"""How sure of itself a drafter may be: scales its logits to what brings the most tokens per step.

    python checkpoints/train/confidence.py TARGET TEXTS DRAFT

TARGET is the quantised target's folder, TEXTS what texts.py made with it, DRAFT the folder of drafter.py's training,
which gets the drafter to be used as `scaled/`. A drafter that has seen few texts believes too much in its first choice;
its trees are then narrower than they should be. What is tried continues the beginnings of held-out texts, greedily.
"""

import argparse
import json
import tempfile
from pathlib import Path

import ml_dtypes
import numpy as np
import texts
from card import tokens_per_step
from safetensors.numpy import load_file, save_file

import muse_jax

SCALES = (1.0, 0.85, 0.7, 0.55)
SELECTOR = "candidate_selector.predecessor_codebook"
"""Its product with what follows is the selector's part of the logits."""


def scale_logits(draft: Path, out: Path, scale: float) -> None:
    """Writes a draft whose logits are those of `draft` times `scale`, both in z-lab's layout."""
    out.mkdir(parents=True, exist_ok=True)
    config = json.loads((draft / "config.json").read_text(encoding="utf-8"))
    config["dflash_config"]["output_multiplier"] *= scale
    (out / "config.json").write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")
    arrays = load_file(draft / "model.safetensors")
    arrays[SELECTOR] = (arrays[SELECTOR].astype(np.float32) * scale).astype(ml_dtypes.bfloat16)
    save_file(arrays, out / "model.safetensors")


def main() -> None:
    """Tries all scales, keeps the best."""
    parser = argparse.ArgumentParser(description="Scales a drafter's logits to what brings the most tokens per step.")
    parser.add_argument("target", type=Path, help="the quantised target's folder")
    parser.add_argument("texts", type=Path, help="folder that texts.py made with it")
    parser.add_argument("draft", type=Path, help="folder of drafter.py's training")
    parser.add_argument("--prompts", type=int, default=48, help="held-out beginnings to continue")
    args = parser.parse_args()
    model = muse_jax.load(args.target)
    rows = np.load(args.texts / "held_out.npy")[: args.prompts].astype(np.int32)
    prompts, new_tokens = rows[:, : texts.PROMPT], rows.shape[1] - texts.PROMPT
    brought = {}
    for scale in SCALES:
        with tempfile.TemporaryDirectory() as trial:
            scale_logits(args.draft / "model", Path(trial), scale)
            brought[scale], _ = tokens_per_step(model, Path(trial), None, prompts, new_tokens)
        print(f"logits times {scale}: {brought[scale]:.3f} tokens per step", flush=True)
    best = max(brought, key=lambda scale: brought[scale])
    scale_logits(args.draft / "model", args.draft / "scaled", best)
    print(f"{args.draft / 'scaled'}: logits times {best}")


if __name__ == "__main__":
    main()
