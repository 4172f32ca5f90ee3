"""Measures the trained pair on held-out text and writes its model card.

    python checkpoints/train/card.py RUNS DATA PAIR

RUNS has the folders `target` and `draft` of target.py and drafter.py, the latter with confidence.py's drafter, DATA is
what corpus.py made, PAIR has the quantised target as `target` and gets the drafter as `draft` and the card as
README.md. The exit code is 1 if one log-probability of the decode path differs from the training path's in a single
bit, or if the pair is over 24 MB.
"""

import argparse
import dataclasses
import json
import math
import shutil
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from tokenizers import Tokenizer

import muse_jax
from muse_jax import decode
from muse_jax.mesh import own_mesh
from muse_jax.model import Reference
from muse_jax.speculative import pick
from muse_jax.weights import load

LIMIT = 24_000_000
"""Bytes of a pair."""
WIDTHS = (4, 8, 16)
PROMPT, NEW_TOKENS = 64, 192


def decoded_log_probs(model: muse_jax.LanguageModel, tokens: np.ndarray) -> np.ndarray:
    """What the fused step says of given tokens, one step for each: ids [B, T], B at most 64 -> fp32 [B, T - 1]."""
    state = model.init_state(batch=len(tokens), capacity=tokens.shape[1])
    with own_mesh(model.mesh):
        found = np.asarray(_decoded(model.weights, state, jnp.asarray(tokens.T, jnp.int32))).T
    model.weights.communicator.check()
    return found


@jax.jit
def _decoded(weights: decode.DecodeWeights, state: decode.DecodeState, columns: jax.Array) -> jax.Array:
    def step(state: decode.DecodeState, pair: tuple[jax.Array, jax.Array]) -> tuple[decode.DecodeState, jax.Array]:
        token, following = pair
        output, state = decode.decode_step(weights, state, token)
        _, (log_probs, *_) = pick(weights, dataclasses.replace(output, token=following), state.lengths, None, 0)
        return state, log_probs

    return lax.scan(step, state, (columns[:-1], columns[1:]))[1]


def both_paths(model: muse_jax.LanguageModel, masters: dict[str, jax.Array], rows: np.ndarray) -> tuple[float, int]:
    """The mean log-probability of ids [N, T] from the second column on; in how many of them the paths differ.

    Args:
        model: what decodes.
        masters: what trained: the same weights before their quantisation.
        rows: the text.
    """
    total, differing = 0.0, 0
    reference = Reference(model.config, model.mesh)
    for start in range(0, len(rows), 64):
        batch = rows[start : start + 64]
        trained = np.asarray(reference.log_probs(masters, batch))
        decoded = decoded_log_probs(model, batch)
        differing += int((trained.view(np.uint32) != decoded.view(np.uint32)).sum())
        total += float(trained.sum(dtype=np.float64))
    return total / (rows.size - len(rows)), differing


def token_bytes(tokenizer: Tokenizer) -> np.ndarray:
    """int64 [V]: bytes of text that a token stands for; special tokens stand for none."""
    special = {token for token, added in tokenizer.get_added_tokens_decoder().items() if added.special}
    # A byte-level vocabulary has one character for each byte.
    return np.array(
        [0 if i in special else len(tokenizer.id_to_token(i) or "") for i in range(tokenizer.get_vocab_size())]
    )


def tokens_per_step(
    model: muse_jax.LanguageModel, draft: Path, width: int | None, prompts: np.ndarray, new_tokens: int
) -> tuple[float, list[list[int]]]:
    """(tokens that a step brings, texts) where prompts [N, P] are continued greedily; width None: the draft's own."""
    loaded = muse_jax.load_draft(draft, model, width=width)
    together = decode.MAX_ROWS // loaded.width
    tokens: list[list[int]] = []
    steps = brought = 0
    for start in range(0, len(prompts), together):
        out = muse_jax.generate(
            model, prompts[start : start + together].tolist(), max_new_tokens=new_tokens, stop_ids=(), draft=loaded
        )
        assert out.acceptance is not None and out.tokens_per_step is not None
        count = sum(map(len, out.acceptance.accepted))
        steps, brought = steps + count, brought + out.tokens_per_step * count
        tokens += out.tokens
    return brought / steps, tokens


def accepted_per_step(
    model: muse_jax.LanguageModel, draft: Path, prompts: np.ndarray, new_tokens: int
) -> dict[int, float]:
    """`tokens_per_step` by width; one text whatever the width."""
    found = {width: tokens_per_step(model, draft, width, prompts, new_tokens) for width in WIDTHS}
    texts = [text for _, text in found.values()]
    assert all(text == texts[0] for text in texts), "the text depends on the draft's width"
    return {width: brought for width, (brought, _) in found.items()}


def folder_bytes(folder: Path) -> int:
    """Of all files in it."""
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def main() -> None:
    """Measures, prints, writes the card."""
    parser = argparse.ArgumentParser(description="Measures a trained pair on held-out text and writes its model card.")
    parser.add_argument("runs", type=Path, help="folder of `target` and `draft`, as the training scripts left them")
    parser.add_argument("data", type=Path, help="folder that corpus.py made")
    parser.add_argument("pair", type=Path, help="folder of `target`, quantised")
    parser.add_argument("--rows", type=int, default=1000, help="at most so many rows of held-out text")
    parser.add_argument("--length", type=int, default=1024, help="tokens of a row")
    parser.add_argument("--prompts", type=int, default=32, help="held-out beginnings to continue with drafts")
    args = parser.parse_args()
    begin = time.monotonic()
    shutil.copytree(args.runs / "draft/scaled", args.pair / "draft", dirs_exist_ok=True)
    model = muse_jax.load(args.pair / "target")
    assert model.tokenizer is not None
    config, masters = load(args.runs / "target/model", model.mesh)
    held_out = np.load(args.data / "held_out.npy").astype(np.int32)
    rows = held_out[: len(held_out) // args.length * args.length].reshape(-1, args.length)[: args.rows]
    tokens = rows[:, 1:]
    per_token = tokens.size / token_bytes(model.tokenizer)[tokens].sum() / math.log(2)
    plain = config.replace(expert_formats=("bf16",) * config.num_hidden_layers)
    bits, differing = {}, 0
    for name, decoder in (("NVFP4", model), ("bf16", muse_jax.LanguageModel(plain, masters, model.mesh))):
        mean, wrong = both_paths(decoder, masters, rows)
        bits[name], differing = -mean * per_token, differing + wrong
        print(
            f"{name}: {bits[name]:.4f} bits per byte, {wrong} of {tokens.size:,} log-probabilities differ", flush=True
        )
    starts = np.linspace(0, len(held_out) - PROMPT, args.prompts).astype(int)
    accepted = accepted_per_step(model, args.pair / "draft", held_out[starts[:, None] + np.arange(PROMPT)], NEW_TOKENS)
    for width, count in accepted.items():
        print(f"width {width}: {count:.2f} tokens per step", flush=True)

    data, recipes = (
        json.loads((args.data / "data.json").read_text()),
        {name: json.loads((args.runs / name / "recipe.json").read_text()) for name in ("target", "draft")},
    )
    (args.pair / "README.md").write_text(
        card(
            data,
            recipes,
            bits,
            tokens.size,
            differing,
            accepted,
            args.prompts,
            muse_jax.load_draft(args.pair / "draft", model).config.output_multiplier / config.output_multiplier,
            str(model.mesh.devices.flat[0].device_kind),
        ),
        encoding="utf-8",
    )
    for name in ("target", "draft"):
        shutil.copyfile(args.runs / name / "loss.png", args.pair / f"{name}_loss.png")
    size = folder_bytes(args.pair)
    print(f"{args.pair}: {size:,} bytes, {time.monotonic() - begin:.0f} s")
    if differing or size > LIMIT:
        sys.exit(f"{differing} log-probabilities differ, allowed: 0; {size:,} bytes, allowed: {LIMIT:,}")


def card(
    data: dict, recipes: dict, bits: dict[str, float], count: int, differing: int, accepted: dict[int, float],
    prompts: int, scale: float, device: str,
) -> str:  # fmt: skip
    """The model card's text."""
    settings = "\n".join(
        f"| {name} | " + ", ".join(f"{key.replace('_', ' ')} {value}" for key, value in recipe.items()) + " |"
        for name, recipe in recipes.items()
    )
    widths = "\n".join(f"| {width} | {value:.2f} |" for width, value in accepted.items())
    return f"""# A trained pair: model card

A small Muse Spark and its DFlash2 drafter, which write Python. `target/` was trained by muse-jax's expert-parallel
reference, through the quantisation of its experts, so that what decodes is what was trained, to the last bit.

## Data

{data["source"]}, licence {data["licence"]}: {data["train"]["files"]} files, {data["train"]["tokens"]:,} tokens;
{data["held_out"]["files"]} files are held out, chosen by their hash. Vocabulary: {data["vocabulary"]}. The drafter
learned from the target's continuations of beginnings from the training files.

## Recipe

| | |
|---|---|
{settings}

AdamW and a cosine; routers are balanced by their biases. The drafter's logits were then scaled by {scale:.2f}, which
brought most tokens per step on other held-out beginnings. Scripts: `checkpoints/train`.

| target | drafter |
|---|---|
| ![loss](target_loss.png) | ![loss](draft_loss.png) |

## Measured, on held-out text ({device})

| experts | bits per byte |
|---|---|
| NVFP4, as trained and as in `target/` | {bits["NVFP4"]:.4f} |
| bf16, the masters without quantisation | {bits["bf16"]:.4f} |

Training path and decode path: {differing} of {2 * count:,} log-probabilities differ.

| draft width | tokens per step |
|---|---|
{widths}

{prompts} beginnings of {PROMPT} tokens, continued greedily by {NEW_TOKENS}.
"""


if __name__ == "__main__":
    main()
