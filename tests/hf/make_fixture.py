"""Write tests/data/hf_tiny: a tiny random Muse Spark and what Hugging Face's own implementation computes with it.

    python tests/hf/make_fixture.py [OUT_DIR] [--seed N] [--sequences N N] [--length T]

Nothing of muse-jax is imported: this is the outside oracle. It writes

    config.json, model.safetensors   a checkpoint with the released tensor names and dtypes (bf16, but the router's
                                     weight and bias fp32; rows of q_proj and k_proj split-half)
    oracle.npz                       input_ids [B, T] and, for each variant V:
        V/hidden    [L+1, B, T, H]   normalised embeddings, then the residual stream after each layer (un-normed)
        V/router    [L, B*T, E]      router logits after output_multiplier
        V/selected  [L, B*T, K]      experts chosen, ascending id
        V/logits    [B, T, vocab]    after multiplier and soft cap

Variants, on the same bf16-representable weights:

    fp32         everything in fp32: the semantic reference
    bf16_res32   Hugging Face's bf16 operators around an fp32 residual stream, fp32 logits. Its roundings are not
                 muse-jax's (it rounds more often), so it only shows what bf16 noise looks like

Needs torch==2.13.0 (CPU), transformers==5.23.0, safetensors, numpy; about 5 seconds.
"""

import argparse
import hashlib
import math
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from transformers import MuseSparkConfig, MuseSparkForConditionalGeneration

HERE = Path(__file__).resolve().parent

# Inputs of norms, made so small that the norm's epsilon (1e-5, or 1e-8 where a larger one would show) matters.
SMALL = {
    "embed_tokens.weight": 2**-3,
    "q_proj.weight": 2**-7,
    "k_proj.weight": 2**-7,
    "v_proj.weight": 2**-7,
    "o_proj.weight": 2**-8,
    "pre_expert_proj.weight": 2**-8,
    "experts.down_proj": 2**-8,
    "post_expert_proj.weight": 2**-8,
}


def tiny_config() -> MuseSparkConfig:
    """Two layers, one of each kind. All widths differ, so that a swapped dimension cannot pass."""
    hidden = 256
    text = {
        "vocab_size": 320,
        "hidden_size": hidden,
        "intermediate_size": 640,  # unused: every layer is sparse
        "num_hidden_layers": 2,
        "num_attention_heads": 16,  # q width 1024, kv width 512: query head h reads kv head h // 2
        "num_key_value_heads": 8,
        "head_dim": 64,
        "max_position_embeddings": 4096,
        "sliding_window": 16,
        "layer_types": ["sliding_attention", "full_attention"],
        "layer_rope_theta": [500000.0, 0],
        "moe_hidden_size": 128,
        "moe_intermediate_size": 384,
        "num_local_experts": 8,
        "num_experts_per_tok": 4,
        "output_multiplier": 0.5,  # 1/sqrt(hidden/256) would be 1: a missing one would not show
        "qk_scale_factor": 1.75,
        "bos_token_id": 0,
        "eos_token_id": 1,
    }
    # The class insists on towers; the text path never calls them.
    vision = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_attention_heads": 2,
        "num_hidden_layers": 1,
        "pos_emb_height": 2,
        "pos_emb_width": 2,
        "max_position_embeddings": 4,
    }
    audio = {"hidden_sizes": [8, 8, 8, 8], "depths": [1, 1, 1, 1], "out_hidden_size": hidden}
    return MuseSparkConfig(
        text_config=text,
        vision_config=vision,
        audio_config=audio,
        out_hidden_size=128,
        projector_hidden_size=32,
        dtype="bfloat16",
        architectures=["MuseSparkForConditionalGeneration"],
    )


def random_weights(model: torch.nn.Module, seed: int) -> dict[str, torch.Tensor]:
    """Weights that exercise every branch, yet keep rounding noise from growing: see the comments."""
    gen = torch.Generator().manual_seed(seed)
    out = {}
    for name, ref in sorted(model.state_dict().items()):
        w = torch.randn(ref.shape, generator=gen)
        if name.endswith("mlp.gate.weight"):
            w = 0.2 * w  # router logits with standard deviation 1.6
        elif name.endswith("e_score_correction_bias"):
            w = 0.1 * w  # changes the winners
        elif name.endswith("residual_gate.gate"):
            w = 0.2 * w - 0.5  # beta near 0.16 ...
            w[::29] = 6.0  # ... and some channels with alpha^2 below the clamp at 1e-3
        elif name.endswith("language_model.norm.weight"):
            w = 1.0 + 0.2 * w  # plain gain
        elif name.endswith(("post_feedforward_layernorm.weight", "post_expert_norm.weight")):
            w = 0.6 * w  # scale before normalising is not the same as after
        elif name.endswith(("layernorm.weight", "expert_norm.weight")):
            w = 0.2 * w  # zero-centred gain
        elif name == "lm_head.weight":
            pass  # logits reach the soft cap
        elif ".experts." in name:  # related experts: one flipped choice stays a small change
            w = (torch.randn(ref.shape[1:], generator=gen) + 0.5 * w) / math.sqrt(ref.shape[-1])
            if name.endswith("down_proj"):  # sizes that only the norm after each expert makes equal
                w = w * torch.exp(0.5 * torch.randn(ref.shape[0], ref.shape[1], 1, generator=gen))
                w = w * torch.linspace(0.5, 2.0, ref.shape[0])[:, None, None]
        else:
            w = w / math.sqrt(ref.shape[-1])
        for end, factor in SMALL.items():
            w = w * factor if name.endswith(end) else w
        fp32 = name.endswith(("mlp.gate.weight", "e_score_correction_bias"))
        out[name] = w.contiguous() if fp32 else w.to(torch.bfloat16)
    return out


def layer_forward_res32(self, hidden_states, **kwargs):
    """A decoder layer whose residual stream is fp32 and whose branches stay in the weight dtype."""
    low, stream = self.self_attn.q_proj.weight.dtype, hidden_states.float()
    branch, _ = self.self_attn(hidden_states=self.input_layernorm(stream).to(low), **kwargs)
    stream = self.post_attention_residual_gate(stream, self.post_attention_layernorm(branch))
    branch = self.mlp(self.pre_feedforward_layernorm(stream).to(low))
    return self.post_feedforward_residual_gate(stream, self.post_feedforward_layernorm(branch))


def patch_res32(model) -> None:
    """Turn a stock bf16 model into the bf16_res32 variant (patches of this instance only)."""
    text, head = model.model.language_model, model.lm_head
    norm, rope = text.norm.forward, text.rotary_emb.forward
    for layer in text.layers:
        layer.forward = layer_forward_res32.__get__(layer)
    text.norm.forward = lambda x: norm(x.to(torch.bfloat16))  # the final norm reads the rounded stream
    text.rotary_emb.forward = lambda x, pos: rope(x.to(torch.bfloat16), pos)
    head.forward = lambda x: F.linear(x.float(), head.weight.float())


@torch.no_grad()
def run(model, ids: torch.Tensor) -> dict[str, np.ndarray]:
    """One forward of the whole sequences, with captures; the router's choice is checked against its logits."""
    chosen = []
    routers = [layer.mlp.gate for layer in model.model.language_model.layers]
    hooks = [r.register_forward_hook(lambda _m, _i, out: chosen.append(out[2])) for r in routers]
    out = model(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        use_cache=False,
        output_hidden_states=True,
        output_router_logits=True,
    )
    for hook in hooks:
        hook.remove()
    selected = torch.stack(chosen).sort(-1).values.numpy().astype(np.int32)
    router = torch.stack(list(out.router_logits)).float().numpy()
    bias = np.stack([r.e_score_correction_bias.numpy() for r in routers])
    key = 1 / (1 + np.exp(-router)) + bias[:, None]
    order = np.argsort(-key, axis=-1, kind="stable")
    top = selected.shape[-1]
    assert np.array_equal(np.sort(order[..., :top], axis=-1), selected), "selected is not the top-k of the keys"
    ranked = np.take_along_axis(key, order, -1)
    plain = np.sort(np.argsort(-router, axis=-1, kind="stable")[..., :top], axis=-1)
    print(
        f"  closest choice: gap {np.min(ranked[..., top - 1] - ranked[..., top]):.1e} between kept and dropped keys; "
        f"the bias changes {np.any(plain != selected, -1).sum()} of {plain[..., 0].size} choices"
    )
    return {
        "hidden": torch.stack([h.float() for h in out.hidden_states]).numpy(),
        "router": router,
        "selected": selected,
        "logits": out.logits.float().numpy(),
    }


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out_dir", type=Path, nargs="?", default=HERE.parent / "data" / "hf_tiny")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--sequences", type=int, nargs="+", default=[1440, 3293], help="seeds of the tokens")
    parser.add_argument("--length", type=int, default=48)
    args = parser.parse_args()
    torch.set_num_threads(1)  # a fixed order of summation on one machine
    args.out_dir.mkdir(parents=True, exist_ok=True)

    config = tiny_config()
    with torch.device("meta"):
        skeleton = MuseSparkForConditionalGeneration(config)
    save_file(random_weights(skeleton, args.seed), args.out_dir / "model.safetensors", metadata={"format": "pt"})
    config.save_pretrained(args.out_dir)

    # The default seeds were sought: no router choice is close, so that bf16 roundings flip no expert.
    gens = [torch.Generator().manual_seed(seed) for seed in args.sequences]
    ids = torch.stack([torch.randint(2, config.text_config.vocab_size, (args.length,), generator=g) for g in gens])
    arrays = {"input_ids": ids.numpy().astype(np.int32)}
    for variant, dtype in (("fp32", torch.float32), ("bf16_res32", torch.bfloat16)):
        print(variant)
        # from_pretrained, never .to(bfloat16): only that keeps gates, router and bias in fp32.
        model = MuseSparkForConditionalGeneration.from_pretrained(args.out_dir, dtype=dtype).eval()
        layer = model.model.language_model.layers[0]
        assert layer.post_attention_residual_gate.gate.dtype == layer.mlp.gate.weight.dtype == torch.float32
        for part in (model, model.model, model.model.language_model):
            part.config.tie_last_hidden_states = False  # the last hidden state is the stream, not its norm
        if variant == "bf16_res32":
            patch_res32(model)
        got = run(model, ids)
        arrays |= {f"{variant}/{key}": value for key, value in got.items()}
        for key, value in got.items():
            line = f"  {key:9s} {value.shape!s:18s} sha256 {sha256(value.tobytes())}  max {np.abs(value).max():.4f}"
            print(line + f"  differs from fp32 by {np.abs(value - arrays[f'fp32/{key}']).max():.1e}")
    np.savez_compressed(args.out_dir / "oracle.npz", **arrays)
    for path in sorted(args.out_dir.iterdir()):
        print(f"{path.name:18s} {path.stat().st_size:9d} bytes  sha256 {sha256(path.read_bytes())}")


if __name__ == "__main__":
    main()
