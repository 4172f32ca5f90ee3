"""What the tests of checkpoints/train share: a target small enough to train in seconds."""

from muse_jax.config import MuseSparkConfig

TARGET = MuseSparkConfig.tiny().replace(
    vocab_size=64, hidden_size=128, num_hidden_layers=2, num_attention_heads=8, num_key_value_heads=8,
    moe_hidden_size=128, moe_intermediate_size=128, num_local_experts=8, num_experts_per_tok=2, sliding_window=8,
    layer_types=("sliding_attention", "full_attention"), layer_rope_theta=(10000.0, 0.0),
    expert_formats=("bf16", "nvfp4"), bos_token_id=0, eos_token_ids=(1,), pad_token_id=2,
)  # fmt: skip
