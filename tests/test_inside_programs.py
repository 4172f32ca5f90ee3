"""The library in other people's programs: any context mesh, export, ahead-of-time compilation, and what is refused."""

from __future__ import annotations

import re

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from decode_helpers import small
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from op_helpers import same

from muse_jax import LanguageModel, Sampling, generate, make_mesh, stream
from muse_jax.decode import custom_calls, decode_step, init_state, prefill
from muse_jax.loop import advance, begin
from muse_jax.sampling import as_choice
from muse_jax.speculative import NoDraft
from muse_jax.weights import random_params

CALLS = {"muse_decode_layers_v1": 1}
PROMPTS = [[3, 1, 4], [1, 5]]


@pytest.fixture(scope="module")
def model():
    config, mesh = small(), make_mesh(8)
    return LanguageModel(config, random_params(config, 61, mesh, quantized=True), mesh)


def start(model):
    return prefill(model.weights, model.init_state(batch=2, capacity=64), PROMPTS)[1]


TOKENS = np.array([7, 9], np.int32)


def three_steps(weights, state, tokens):
    """A user's loop."""

    def body(carry, _):
        output, state = decode_step(weights, *carry)
        return (state, output.token), output.logits

    return jax.lax.scan(body, (state, tokens), None, length=3)[1]


@pytest.fixture(scope="module")
def want(model):
    """Logits [3, 2, V]."""
    return np.asarray(jax.jit(three_steps)(model.weights, start(model), jnp.asarray(TOKENS)))


# Meshes --------------------------------------------------------------------------------------------------------------


def mesh_of(kind: AxisType, *shape: int) -> Mesh:
    names = ("rank",) if len(shape) == 1 else ("x", "y")
    return Mesh(np.array(jax.devices()[:8]).reshape(shape), names, axis_types=(kind,) * len(shape))


MESHES = [
    mesh_of(AxisType.Explicit, 8), mesh_of(AxisType.Explicit, 2, 4),
    mesh_of(AxisType.Auto, 8), mesh_of(AxisType.Auto, 4, 2),
]  # fmt: skip


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_any_context_mesh(model, want, mesh):
    """jax.set_mesh with axes of either type: everything gives the bytes that it gives without."""
    options = dict(max_new_tokens=8, stop_ids=(), sampling=Sampling(temperature=1.5), logprobs=0)
    whole = generate(model, PROMPTS, keys=jax.random.split(jax.random.key(1), 2), **options)
    reference = model.reference([PROMPTS[0]])
    with jax.set_mesh(mesh):
        state, tokens = start(model), jax.device_put(TOKENS, NamedSharding(mesh, PartitionSpec()))
        same(jax.jit(decode_step)(model.weights, state, tokens)[0].logits, want[0])
        same(decode_step(model.weights, state, tokens)[0].logits, want[0])
        same(model.decode_step(start(model), TOKENS)[0].logits, want[0])
        same(model.reference([PROMPTS[0]]), reference)
        made = generate(model, PROMPTS, keys=jax.random.split(jax.random.key(1), 2), **options)
        # A program whose own operations touch what steps return names the weights' mesh.
        with jax.sharding.use_abstract_mesh(model.mesh.abstract_mesh):
            same(jax.jit(three_steps)(model.weights, state, jnp.asarray(TOKENS)), want)
    assert made.tokens == whole.tokens
    for a, b in zip(made.log_probs, whole.log_probs, strict=True):
        same(a, b)


def test_strict_promotion(model, want):
    """A caller's settings of dtype and rank promotion are the caller's: they change nothing and break nothing."""
    options = dict(max_new_tokens=8, stop_ids=(), sampling=Sampling(temperature=1.5), logprobs=0)
    keys = jax.random.split(jax.random.key(1), 2)
    full = Sampling(temperature=1.5, top_k=5, top_p=0.9, min_p=0.01, logit_bias={3: 2.0})
    whole = generate(model, PROMPTS, keys=keys, **options)
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        same(jax.jit(three_steps)(model.weights, start(model), jnp.asarray(TOKENS)), want)
        strict = generate(model, PROMPTS, keys=keys, **options)
        as_choice([full, Sampling(temperature=0)], keys, batch=2, vocab=model.config.vocab_size)
        assert model.reference([PROMPTS[0]]).shape == (1, len(PROMPTS[0]), model.config.vocab_size)
    assert strict.tokens == whole.tokens
    for mine, theirs in zip(strict.log_probs, whole.log_probs, strict=True):
        same(mine, theirs)


def test_a_model_made_on_an_explicit_mesh(model, want):
    mesh = mesh_of(AxisType.Explicit, 8)
    with jax.set_mesh(mesh):
        other = LanguageModel(model.config, model.params, mesh)
        same(other.decode_step(start(other), TOKENS)[0].logits, want[0])


# Refused -------------------------------------------------------------------------------------------------------------

SENTENCE = (
    "read values on the host and cannot be called inside jit, scan or vmap; call them outside, and muse_jax.decode"
)


@pytest.mark.parametrize(
    "program",
    [
        lambda model: jax.jit(lambda ids: generate(model, ids).tokens)(jnp.array([1, 2])),
        lambda model: jax.jit(lambda ids: generate(model, [ids, [1]]).tokens)(jnp.array([1, 2])),
        lambda model: jax.jit(lambda x: x + generate(model, [1, 2], max_new_tokens=1).tokens[0][0])(1),
        lambda model: jax.vmap(lambda ids: generate(model, ids).tokens)(jnp.array([[1, 2], [3, 4]])),
        lambda model: jax.lax.scan(lambda c, ids: (c, list(stream(model, ids))), 0, jnp.array([[1, 2], [3, 4]])),
        lambda model: jax.jit(lambda state: model.prefill(state, PROMPTS))(model.init_state(batch=2, capacity=16)),
        lambda model: jax.jit(lambda state: model.prefill_whole(state, PROMPTS))(
            model.init_state(batch=2, capacity=16)
        ),
    ],
    ids=["jit", "jit of one of several", "jit around known prompts", "vmap", "scan", "prefill", "prefill_whole"],
)
def test_what_reads_on_the_host(model, program):
    with pytest.raises(TypeError, match=SENTENCE):
        program(model)


def test_shard_map_is_refused(model):
    state, spec = start(model), PartitionSpec()
    inside = jax.shard_map(
        lambda tokens: decode_step(model.weights, state, tokens)[0].token,
        mesh=model.mesh, in_specs=spec, out_specs=spec, check_vma=False,
    )  # fmt: skip
    with pytest.raises(ValueError, match="cannot run inside shard_map or pmap; call it outside, or inside jit, scan"):
        jax.jit(inside)(jnp.asarray(TOKENS))


# Compiled and exported programs --------------------------------------------------------------------------------------


def test_export(model, want):
    """Through bytes and back, arrays as a flat list; a name is allowed for every custom call."""
    leaves, tree = jax.tree.flatten((model.weights, start(model)))

    def program(leaves, tokens):
        return three_steps(*jax.tree.unflatten(tree, leaves), tokens)

    with pytest.raises(ValueError, match=r"custom_call @muse_decode_layers_v1"):
        jax.export.export(jax.jit(program))(leaves, TOKENS)
    allowed = [jax.export.DisabledSafetyCheck.custom_call(name) for name in CALLS]
    data = jax.export.export(jax.jit(program), disabled_checks=allowed)(leaves, TOKENS).serialize()
    exported = jax.export.deserialize(data)
    assert exported.nr_devices == 8
    same(exported.call(leaves, TOKENS), want)
    same(jax.jit(exported.call)(leaves, TOKENS), want)


def test_ahead_of_time(model, want):
    """Lowered from shapes alone; the state that is given is consumed, and says so."""
    state = start(model)
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), (model.weights, state))
    compiled = jax.jit(decode_step, donate_argnames="state").lower(*shapes, jnp.asarray(TOKENS)).compile()
    assert custom_calls(compiled) == CALLS
    same(compiled(model.weights, state, jnp.asarray(TOKENS))[0].logits, want[0])
    with pytest.raises(ValueError, match="this state was consumed by an earlier step; use the state that the step"):
        decode_step(model.weights, state, TOKENS)


@pytest.mark.parametrize(("sampled", "logprobs"), [(False, None), (True, 0)])
def test_the_loop_of_generate(model, sampled, logprobs):
    """One call per step in one while loop, no weights on the move: at most the logits are gathered."""
    mesh, vocab = model.mesh, model.config.vocab_size
    first, state = prefill(model.weights, init_state(model.config, mesh, batch=2, capacity=64), PROMPTS)
    keys = jax.random.split(jax.random.key(0), 2)
    choice = as_choice(Sampling(), keys, batch=2, vocab=vocab) if sampled else None
    stops, count = np.full(8, -1, np.int32), np.int32(20)
    kept = begin(model.weights, state.lengths, first, stops, choice, count, space=64, logprobs=logprobs, drafted=False)
    program = advance.lower(model.weights, state, kept, stops, choice, NoDraft(), (), count).compile()
    text = program.as_text()
    assert {name: n for name, n in custom_calls(program).items() if "decode" in name} == CALLS
    assert sampled or custom_calls(program) == CALLS
    assert sampled or len(re.findall(r" while\(", text)) == 1  # the random bits' are others
    collectives = re.findall(
        r" = (\S+) (all-gather|all-reduce|all-to-all|reduce-scatter|collective-permute)(?:-start)?\(", text
    )
    assert collectives == ([(collectives[0][0], "all-gather")] if sampled else [])
    assert not sampled or re.match(rf"[uf]32\[2,{vocab}\]", collectives[0][0])
