"""Texts on GPUs: greedy, sampled and drafted, against the CPU's and against plain decoding."""

import gpu_helpers as helpers
import jax
import numpy as np

from muse_jax import MuseSparkConfig, Sampling, generate, random_draft
from muse_jax.speculative.dflash_config import DFlashConfig

PROMPTS = [[5, 9, 2], [61, 0, 7, 7, 30], [3], list(range(40, 60))]
CONFIG = MuseSparkConfig.tiny().replace(
    num_hidden_layers=3, layer_types=("sliding_attention", "full_attention", "sliding_attention"),
    layer_rope_theta=(500000.0, 0.0, 500000.0), expert_formats=("nvfp4", "bf16", "nvfp4"), hidden_size=128,
    num_attention_heads=8,
)  # fmt: skip
# Greedy, and each option of the sampler.
OPTIONS = [
    Sampling(temperature=0.0), Sampling(temperature=0.9, top_k=20), Sampling(temperature=1.1, top_p=0.9),
    Sampling(temperature=1.3, min_p=0.05),
]  # fmt: skip


def made(model, steps, **more):
    keys = jax.random.split(jax.random.key(11), len(PROMPTS))
    return generate(model, PROMPTS, max_new_tokens=steps, stop_ids=(), sampling=OPTIONS, keys=keys, logprobs=3, **more)


def same(found, expected, same_bytes):
    assert found.tokens == expected.tokens
    assert [t.tolist() for t in found.top_tokens] == [t.tolist() for t in expected.top_tokens]
    same_bytes((found.log_probs, found.top_log_probs), (expected.log_probs, expected.top_log_probs))


def test_sampled_text_is_the_cpu_s(gpus, same_bytes):
    cpu, gpu = helpers.twins(CONFIG, gpus, 4)
    same(made(gpu, 48), made(cpu, 48), same_bytes)


def test_drafted_text_is_the_plain_one(gpus, same_bytes):
    """A DFlash2 draft of random weights, trees of 16 tokens; the draft runs on the GPUs too."""
    _, gpu = helpers.twins(CONFIG, gpus, 5)
    config = DFlashConfig(
        vocab_size=CONFIG.vocab_size, hidden_size=128, num_attention_heads=8, num_key_value_heads=2, head_dim=16,
        intermediate_size=128, windows=(12, None), rope_theta=1e4, rms_norm_eps=1e-5, tap_layers=(0, 2),
        mask_token_id=CONFIG.vocab_size - 1, output_multiplier=1.0, final_logit_softcapping=20.0, block_width=16,
        top_k=6, selector_rank=8, conv_group_size=16,
    )  # fmt: skip
    shared = [gpu.params[name] for name in ("embed_tokens.weight", "lm_head.weight")]
    draft = random_draft(config, jax.random.key(3), *shared)
    drafted = made(gpu, 64, draft=draft)
    same(drafted, made(gpu, 64), same_bytes)
    assert np.isfinite(np.concatenate(drafted.log_probs)).all()
