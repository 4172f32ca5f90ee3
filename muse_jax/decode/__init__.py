"""The fused decode step: weights, state, rows, and the custom calls."""

from muse_jax.decode.hlo import custom_calls
from muse_jax.decode.prefill import Prompts, TokenIds, as_prompts, prefill, prefill_whole
from muse_jax.decode.rows import MAX_ROWS, Rows, chain_rows, next_rows, tree_rows
from muse_jax.decode.state import DecodeState, init_state
from muse_jax.decode.step import (
    GRAPH_OPTIONS,
    StepOutput,
    Taps,
    check_state,
    check_tokens,
    decode_step,
    run_head,
    run_layers,
    run_step,
)
from muse_jax.decode.weights import DecodeWeights

__all__ = [
    "GRAPH_OPTIONS",
    "MAX_ROWS",
    "DecodeState",
    "DecodeWeights",
    "Prompts",
    "Rows",
    "StepOutput",
    "Taps",
    "TokenIds",
    "as_prompts",
    "chain_rows",
    "check_state",
    "check_tokens",
    "custom_calls",
    "decode_step",
    "init_state",
    "next_rows",
    "prefill",
    "prefill_whole",
    "run_head",
    "run_layers",
    "run_step",
    "tree_rows",
]
