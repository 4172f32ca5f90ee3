"""The committed pair on GPUs: the demo's text, and the CPU's bits."""

from pathlib import Path

import jax

import muse_jax

PAIR = Path(__file__).parents[2] / "checkpoints/pair"
PROMPTS = ["class Reader(object):", "def copy_file(source, target):", "import json\n\ndef load_config(path):"]


def test_text_is_the_cpu_s(gpus, same_bytes):
    """Greedy and drawn, with drafts; and without on the GPUs."""
    found = []
    for devices, drafted in ((jax.devices("cpu")[:1], True), (gpus, True), (gpus, False)):
        model = muse_jax.load(PAIR / "target", mesh=muse_jax.make_mesh(devices))
        assert model.tokenizer is not None
        ids = [model.tokenizer.encode(prompt).ids for prompt in PROMPTS]
        found.append(
            muse_jax.generate(
                model, ids, max_new_tokens=96, logprobs=3, keys=jax.random.split(jax.random.key(1), 3),
                sampling=[muse_jax.Sampling(temperature=0.0)] * 2 + [muse_jax.Sampling(temperature=0.8)],
                draft=muse_jax.load_draft(PAIR / "draft", model) if drafted else None,
            )
        )  # fmt: skip
    for other in found[1:]:
        assert other.tokens == found[0].tokens
        same_bytes((other.log_probs, other.top_log_probs), (found[0].log_probs, found[0].top_log_probs))
    accepted = [[path.tolist() for path in one.acceptance.accepted] for one in found[:2] if one.acceptance]
    assert len(accepted) == 2 and accepted[0] == accepted[1]
