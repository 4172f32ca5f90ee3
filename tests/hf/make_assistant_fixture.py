"""Write tests/data/hf_assistant: a tiny random DFlash draft and what Hugging Face's own one computes.

    python tests/hf/make_assistant_fixture.py [OUT_DIR] [--seed N]

Nothing of muse-jax is imported: this is the outside oracle. The draft fits the target `SMALL` of
tests/weight_helpers.py. It writes config.json and model.safetensors (bf16) as Hugging Face saves them, and oracle.npz,
all computed in fp32:

    context  [T, E, H]   features of T tokens at positions 0 to T - 1, values of bf16
    block    [W, H]      embeddings of the block after them, values of bf16
    hidden   [W, H]      what the model makes of it

The sliding layer has a window of 10, with which Hugging Face sees distances up to 10.

Needs torch==2.13.0 (CPU), transformers==5.23.0, safetensors, numpy; about 5 seconds.
"""

import argparse
from pathlib import Path

import numpy as np
import torch
from transformers.cache_utils import DFlashCache
from transformers.models.muse_glimmer_assistant import MuseGlimmerAssistantConfig, MuseGlimmerAssistantModel

OUT = Path(__file__).resolve().parents[1] / "data" / "hf_assistant"
TOKENS = 30


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", nargs="?", type=Path, default=OUT)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    generator = torch.Generator().manual_seed(arguments.seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).bfloat16().float()

    config = MuseGlimmerAssistantConfig(
        hidden_size=128, intermediate_size=128, num_hidden_layers=2, num_attention_heads=8, num_key_value_heads=2,
        head_dim=16, rms_norm_eps=1e-5, layer_types=["sliding_attention", "full_attention"], sliding_window=10,
        rope_parameters={"rope_theta": 10000.0, "rope_type": "default"}, block_size=8, mask_token_id=62,
        target_layer_ids=[0, 1], max_position_embeddings=4096, bos_token_id=1, eos_token_id=2, pad_token_id=None,
        attn_implementation="eager",
    )  # fmt: skip
    model = MuseGlimmerAssistantModel(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            noise = normal(*parameter.shape)
            parameter.copy_((noise * noise.shape[-1] ** -0.5 if noise.ndim > 1 else 1 + noise / 5).bfloat16().float())
        context, block = normal(TOKENS, 2, config.hidden_size), normal(config.block_size, config.hidden_size)
        cache = DFlashCache(config=config)
        cache.set_previous_accepted_tokens(TOKENS)
        hidden = model(
            block[None], context.reshape(1, TOKENS, -1), use_cache=True, past_key_values=cache
        ).last_hidden_state[0]
    model.bfloat16().save_pretrained(arguments.out)
    np.savez_compressed(
        arguments.out / "oracle.npz", context=context.numpy(), block=block.numpy(), hidden=hidden.numpy()
    )


if __name__ == "__main__":
    main()
