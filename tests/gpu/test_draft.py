"""The fused draft and acceptance on GPUs: bits against the CPU's, what they launch, their place in a graph."""

import dataclasses

import dflash_helpers as helpers
import gpu_helpers
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from op_helpers import BF16, wild
from test_launches import MOVES, custom_calls, device_events

from muse_jax import LanguageModel, MuseSparkConfig, generate, make_mesh
from muse_jax.decode import GRAPH_OPTIONS, Taps, init_state
from muse_jax.loop import advance, begin
from muse_jax.mesh import replicated
from muse_jax.speculative import DFlashConfig, accept, make_tree, prefill_both, speculative_step
from muse_jax.speculative.dflash import DFlashDraft, make_draft
from muse_jax.speculative.dflash_weights import random_draft


def random_config(rng) -> DFlashConfig:
    """Every dimension that the kernel has a loop over varies."""
    head_dim, kv = int(rng.choice([16, 32, 48, 64, 128])), int(rng.choice([1, 2, 3]))
    heads = kv * int(rng.integers(1, 4)) * 8
    v2, hidden, vocab = bool(rng.integers(2)), 128 * int(rng.integers(1, 5)), 8 * int(rng.integers(4, 400))
    return DFlashConfig(
        vocab_size=vocab, hidden_size=hidden, num_attention_heads=heads, num_key_value_heads=kv, head_dim=head_dim,
        intermediate_size=128 * int(rng.integers(1, 5)), rope_theta=float(rng.choice([1e4, 5e5])),
        windows=tuple(rng.choice([None, 1, 12, 140, 600]) for _ in range(rng.integers(1, 4))), rms_norm_eps=1e-5,
        tap_layers=tuple(range(rng.integers(1, 4))), mask_token_id=vocab - 2,
        output_multiplier=float(rng.choice([0.5, 2])),
        final_logit_softcapping=20.0, block_width=int(rng.integers(2, 17)), top_k=int(rng.integers(2, 33)),
        selector_rank=int(rng.choice([8, 40, 256])) if v2 else None,
        conv_group_size=int(rng.choice([8, 16, 32])) if v2 else None,
    )  # fmt: skip


def placed(draft: DFlashDraft, devices) -> DFlashDraft:
    mesh = make_mesh(devices)
    params, *shared = jax.device_put((dict(draft.params), draft.embedding, draft.head), replicated(mesh))
    return make_draft(draft.config, params, *shared, width=draft.width)


def random_rings(rng, draft: DFlashDraft, lengths: np.ndarray):
    """Contexts as observed tokens leave them, some of them missing; host arrays."""
    config, leaves = draft.config, []
    for layer in range(config.num_layers):
        slots = config.slots(layer, 700)
        position = np.full((len(lengths), slots), -1, np.int32)
        for b, length in enumerate(lengths):
            newest = np.arange(max(0, length - slots), length, dtype=np.int32)
            newest = newest[rng.random(len(newest)) < 0.9]
            position[b, newest % slots] = newest
        shape = (len(lengths), slots, config.num_key_value_heads, config.head_dim)
        leaves.append([rng.standard_normal(shape).astype(BF16), rng.standard_normal(shape).astype(BF16), position])
    return [tuple(layer[i] for layer in leaves) for i in range(3)]


def proposed(draft: DFlashDraft, rings, shown, token, lengths):
    carry = type(draft.start(batch=1, capacity=1))(*rings)
    given = jax.device_put((carry, shown, token, lengths), replicated(draft.mesh))
    return [np.asarray(x) for x in jax.tree.leaves(helpers.propose(draft, *given))]


@pytest.mark.parametrize("seed", range(30))
def test_random_drafts(gpus, seed, same_bytes):
    """DFlash and DFlash2, one to four sequences, trees of any width; a fifth has weights with NaN and infinities."""
    rng = np.random.default_rng(seed)
    with jax.default_device(jax.devices("cpu")[0]):
        config = random_config(rng)
        draft = helpers.make(config, seed, width=int(rng.integers(1, config.block_width + 1)))
        if seed % 5 == 4:
            name = sorted(draft.params)[int(rng.integers(len(draft.params)))]
            draft.params[name] = jnp.asarray(wild(rng, *draft.params[name].shape))
        batch, fed = int(rng.integers(1, 5)), int(rng.integers(1, 40))
        lengths = rng.integers(0, 690, batch).astype(np.int32)
        count = rng.integers(0, fed + 1, batch).astype(np.int32)
        features = wild(rng, batch, fed, len(config.tap_layers), config.hidden_size)
        if seed % 3 == 0:  # the bits that words have before they come
            features.view(np.uint16)[:, -1] = 0xFFFF
        shown = jax.tree.map(np.asarray, helpers.seen(jnp.asarray(features), count, np.maximum(lengths - count, 0)))
        rings, token = random_rings(rng, draft, lengths), rng.integers(0, config.vocab_size, batch).astype(np.int32)
    host, device = (
        proposed(placed(draft, devices), rings, shown, token, lengths) for devices in (jax.devices("cpu")[:1], gpus)
    )
    same_bytes(device, host)


@pytest.mark.parametrize("width", [2, 5, 16, 64])
def test_acceptance(gpus, width, same_bytes):
    """Paths, what follows, the caches of all ranks, the features: 20 random steps."""
    rng, batch = np.random.default_rng(width), 64 // width
    config = gpu_helpers.small_config()
    for _ in range(20):
        lengths = rng.integers(0, 97, batch).astype(np.int32)
        parent = np.array([[-1, *(rng.integers(max(0, i - 3), i) for i in range(1, width))] for _ in range(batch)])
        token, chosen = (rng.integers(0, 2, (batch, width)).astype(np.int32) for _ in range(2))
        nan, active = rng.random(batch * width) < 0.05, rng.random(batch) < 0.8
        residuals = wild(rng, config.num_hidden_layers, 2, batch * width, config.hidden_size).astype(np.float32)
        found = []
        for devices in (jax.devices("cpu")[:1], gpus):
            mesh = make_mesh(devices)
            state = init_state(config, mesh, batch=batch, capacity=96)
            caches = {}
            for name in gpu_helpers.CACHES:
                array = getattr(state, name)
                caches[name] = jax.device_put(wild(np.random.default_rng(width), *array.shape), array.sharding)
            state = dataclasses.replace(state, **caches, lengths=jax.device_put(lengths, state.lengths.sharding))
            put = [jnp.asarray(parent, jnp.int32), token, chosen.reshape(-1), nan, active, residuals]
            parents, tokens, *rest, taps = jax.device_put(put, replicated(mesh))
            with jax.default_device(devices[0]):
                tree = make_tree(tokens, parents)
                got = jax.jit(accept, static_argnames="tap_layers")(
                    state, tree, *rest, Taps(taps, parents, parents), tap_layers=(0, config.num_hidden_layers - 1)
                )
            after = [getattr(got[1], name) for name in (*gpu_helpers.CACHES, "lengths")]
            found.append([np.asarray(x) for x in (*jax.tree.leaves(got[0]), *after)])
        same_bytes(found[1], found[0])


CONFIG = MuseSparkConfig.tiny().replace(
    num_hidden_layers=3, layer_types=("sliding_attention", "full_attention", "sliding_attention"),
    layer_rope_theta=(500000.0, 0.0, 500000.0), expert_formats=("nvfp4", "bf16", "nvfp4"), hidden_size=128,
    num_attention_heads=8,
)  # fmt: skip
DRAFT = helpers.V2.replace(vocab_size=CONFIG.vocab_size, mask_token_id=CONFIG.vocab_size - 1, tap_layers=(0, 2))
PROMPTS = [[5, 9, 2], [61, 0, 7, 7, 30]]


def drafted(model: LanguageModel) -> DFlashDraft:
    return random_draft(DRAFT, jax.random.key(3), *(model.params[f"{n}.weight"] for n in ("embed_tokens", "lm_head")))


def started(model: LanguageModel, draft: DFlashDraft):
    state = init_state(CONFIG, model.mesh, batch=2, capacity=128)
    return prefill_both(model.weights, state, PROMPTS, draft)


def test_the_same_drafts_are_accepted(gpus):
    """Trees on a GPU are the CPU's, so that every step of a text brings as much."""
    cpu, gpu = gpu_helpers.twins(CONFIG, gpus, 5)
    with jax.default_device(jax.devices("cpu")[0]):
        host = drafted(cpu)
    texts = [
        generate(model, PROMPTS, max_new_tokens=40, stop_ids=(), draft=draft)
        for model, draft in ((cpu, host), (gpu, placed(host, gpus)))
    ]
    assert texts[0].tokens == texts[1].tokens
    for one, other in zip(*(text.acceptance.accepted for text in texts), strict=True):
        assert one.tolist() == other.tolist()


def test_launches_per_step(gpus, tmp_path):
    """Three kernels of ours on every device; the others are small ones of XLA's."""
    _, model = gpu_helpers.twins(CONFIG, gpus, 5)
    draft = drafted(model)
    output, state, carry = started(model, draft)
    step, active, token = jax.jit(speculative_step, donate_argnames=("state", "carry")), jnp.ones(2, bool), output.token
    for _ in range(2):
        new, state, carry = step(model.weights, state, draft, carry, token, active)
        token = new.token
    jax.block_until_ready(token)
    with jax.profiler.trace(str(tmp_path)):
        for _ in range(5):
            new, state, carry = step(model.weights, state, draft, carry, token, active)
            token = new.token
        jax.block_until_ready((token, state))
    for plane, counts in device_events(tmp_path).items():
        ours = {
            n: sum(c for name, c in counts.items() if n in name) for n in ("draft_kernel", "accept_kernel", "decode_")
        }
        assert ours == {"draft_kernel": 5, "accept_kernel": 5, "decode_": 5}, (plane, counts)
        others = {n: c for n, c in counts.items() if not MOVES.search(n) and not any(o in n for o in ours)}
        print(plane, others)


def test_the_drafting_loop_is_one_graph(gpus, tmp_path):
    _, model = gpu_helpers.twins(CONFIG, gpus, 5)
    draft = drafted(model)
    first, state, carry = started(model, draft)
    stops, count = np.full(8, -1, np.int32), np.int32(40)
    kept = begin(model.weights, state.lengths, first, stops, None, count, space=64, logprobs=None, drafted=True)

    def drafting(*operands):
        return advance.__wrapped__(*operands)

    options = GRAPH_OPTIONS | gpu_helpers.dump_to(tmp_path)
    run = jax.jit(drafting, donate_argnums=(1, 6), compiler_options=options)
    jax.block_until_ready(run(model.weights, state, kept, stops, None, draft, carry, count))
    calls = custom_calls(gpu_helpers.thunks(tmp_path, "drafting"))
    assert len(calls) == 3 and all(call == ["CommandBuffer", "While"] for call in calls), calls
