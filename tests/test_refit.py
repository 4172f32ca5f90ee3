"""LanguageModel.update: an RL loop's new parameters, in place, with the bytes of a model that is made of them."""

import contextlib
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from decode_helpers import random_bits, small
from dflash_helpers import V1
from flax import nnx
from jax import lax
from op_helpers import same

import muse_jax
from muse_jax import LanguageModel
from muse_jax.decode.weights import SPECS
from muse_jax.mesh import make_mesh
from muse_jax.model.reference import build
from muse_jax.weights import parameter_specs, random_params, refit, save, stored_formats
from muse_jax.weights.repack import repack

# Layers of both formats, whose places among their own kind are not their places among all.
MIXED = small(
    num_hidden_layers=3, layer_types=("sliding_attention", "full_attention", "sliding_attention"),
    layer_rope_theta=(500000.0, 0.0, 500000.0), expert_formats=("nvfp4", "bf16", "nvfp4"), num_experts_per_tok=3,
)  # fmt: skip


@functools.cache
def trainer(mesh):
    """Parameters -> other parameters near them, on the devices."""

    def train(params, step):
        out = {}
        for name, x in params.items():
            noise = lax.iota(jnp.int32, x.size).reshape(x.shape) * step
            if x.dtype == jnp.uint8:
                x = x ^ (noise & 0x11).astype(jnp.uint8)
            elif x.dtype == jnp.float8_e4m3fn:
                bits = lax.bitcast_convert_type(x, jnp.uint8)
                x = lax.bitcast_convert_type(jnp.where(bits & 0x7E == 0x7E, bits, bits ^ 1), x.dtype)  # no NaN
            else:
                x = (x * (1 + 0.2 * jnp.sin(noise.astype(jnp.float32)))).astype(x.dtype)
            out[name] = x
        specs = parameter_specs(MIXED, stored_formats(MIXED, {name: x.dtype for name, x in params.items()}))
        return {name: lax.with_sharding_constraint(x, specs[name].sharding(mesh)) for name, x in out.items()}

    return jax.jit(train)


@contextlib.contextmanager
def compilations():
    """A list that receives an entry for each program that is compiled."""
    seen = []

    def listen(event, duration, **_):
        if event == "/jax/core/compile/backend_compile_duration":
            seen.append(duration)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield seen
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


def same_weights(got, want):
    for name in SPECS:
        if name != "ranks":  # numbers the packings
            a, b = getattr(got, name), getattr(want, name)
            assert a.dtype == b.dtype and a.sharding.is_equivalent_to(b.sharding, a.ndim), name
            try:
                same(a, b)
            except AssertionError as error:
                raise AssertionError(f"{name}: {error}") from None


@pytest.fixture(scope="module", params=["masters", "codes"])
def quantized(request):
    return request.param == "codes"


def test_rounds_of_training(quantized):
    """After each step of a trainer decoding has the bits of the reference of the new parameters; nothing is compiled
    after the first two rounds, and no memory grows."""
    mesh = make_mesh(2)
    model = LanguageModel(MIXED, random_params(MIXED, 0, mesh, quantized=quantized), mesh)
    params, seen = model.params, set()
    with compilations() as compiled:
        for i in range(4 if quantized else 30):
            params = trainer(mesh)(params, i + 1)
            model.update(params)
            report = muse_jax.parity(model, [1, 5, 9], steps=1)
            assert report.differing_bytes == 0, (i, report.first)
            seen.add(np.asarray(model.weights.lm_head.addressable_shards[0].data)[0, 0, 0].tobytes())
            if i == 1:
                compiled.clear()
                live = sum(x.nbytes for x in jax.live_arrays())
        assert not compiled
    assert sum(x.nbytes for x in jax.live_arrays()) == live
    assert len(seen) == i + 1
    same_weights(model.weights, repack(MIXED, params, mesh))


@pytest.mark.parametrize("devices", [1, 8])
def test_every_name_alone(quantized, devices):
    """One parameter after the other into other weights, without the training layout: in the end all bytes are new."""
    mesh = make_mesh(devices)
    make = random_bits if quantized else random_params
    start, end = make(MIXED, 1, mesh), make(MIXED, 2, mesh)
    ends = {name: start[name] for name in refit.ENDS}
    model = LanguageModel(MIXED, ends, mesh, weights=repack(MIXED, start, mesh))
    before = {name: np.asarray(getattr(model.weights, name)) for name in SPECS}
    names = list(end)
    while names:
        name = names.pop(0)
        part = {name: end[name]}
        if name.endswith("gate_up_proj") and not quantized:
            other = name.replace("gate_up", "down")
            names.remove(other)
            part[other] = end[other]
        model.update(part)
        after = {n: np.asarray(getattr(model.weights, n)) for n in SPECS}
        changed = {n for n in SPECS if after[n].tobytes() != before[n].tobytes()}
        assert len(changed) <= (4 if len(part) == 2 else 1), (name, changed)
        before = after
    same_weights(model.weights, repack(MIXED, end, mesh))
    assert {name: id(x) for name, x in model.params.items()} == {name: id(end[name]) for name in refit.ENDS}


def test_masters_come_in_place_of_codes():
    """And codes in place of masters: what the other form had alone is gone."""
    mesh = make_mesh(8)
    codes, masters = (random_params(MIXED, 3, mesh, quantized=q) for q in (True, False))
    model = LanguageModel(MIXED, codes, mesh)
    for params in (masters, codes):
        model.update({name: x for name, x in params.items() if ".mlp.experts." in name})
        assert model.params.keys() == params.keys()
        same_weights(model.weights, repack(MIXED, model.params, mesh))
        assert muse_jax.parity(model, [1, 5], steps=1).differing_bytes == 0


def test_from_a_checkpoint_in_the_decode_layout_and_from_a_module(tmp_path):
    """reference=False, and a trainer that holds an nnx module, or some of its state."""
    mesh = make_mesh(8)
    old, new = (random_params(MIXED, seed, mesh) for seed in (4, 5))
    save(tmp_path / "model", MIXED, old, None)
    model = muse_jax.load(tmp_path / "model", mesh=mesh, reference=False)
    module = build(MIXED, new)
    model.update(nnx.state(module, nnx.PathContains("layers")))
    assert model.params["norm.weight"] is not new["norm.weight"]
    model.update(module)
    assert model.params["norm.weight"] is new["norm.weight"] and len(model.params) == 3
    same_weights(model.weights, repack(MIXED, new, mesh))


def test_programs_write_in_place():
    """Every decode array is the program's argument too, no copy of one is made, and weights only change places:
    nothing is gathered but a number for each expert's matrix."""
    mesh = make_mesh(8)
    for quantized in (False, True):
        params = random_params(MIXED, 0, mesh, quantized=quantized)
        arrays = {name: getattr(repack(MIXED, params, mesh), name) for name in SPECS}
        for layer, own in refit.by_layer(params):
            program, operands = refit.program(MIXED, mesh, arrays, own, layer)
            compiled = program.lower(*operands).compile()
            text = compiled.as_text()
            donated = operands[0]
            header = text.split("entry_computation_layout", 1)[0]
            assert len(re.findall(r"\{\d+\}: \(\d+, \{\}, may-alias\)", header)) == len(donated) >= 3
            kept = sum(x.nbytes // (1 if x.is_fully_replicated else 8) for x in donated.values())
            assert compiled.memory_analysis().alias_size_in_bytes >= kept
            gathered = re.findall(r"= (\S+) all-gather", text)
            assert all(re.match(rf"f32\[{MIXED.num_local_experts},\d\]", shape) for shape in gathered), gathered
            assert re.findall(r"= (.*) all-reduce", text) in ([], ["(f32[], f32[])"])  # the largest input scales


def test_drafts_and_streams():
    """A draft of before the update changes no text; a text that was begun before it is not gone on with."""
    mesh = make_mesh(2)
    model = LanguageModel(MIXED, random_params(MIXED, 0, mesh), mesh)
    shared = [model.params[name] for name in ("embed_tokens.weight", "lm_head.weight")]
    draft = muse_jax.random_draft(
        V1.replace(vocab_size=64, hidden_size=128, tap_layers=(0, 1), mask_token_id=63), jax.random.key(0), *shared
    )
    chunks = muse_jax.stream(model, [1, 2, 3], max_new_tokens=64, stop_ids=(), every=2)
    next(chunks)
    old = model.weights
    state = model.init_state(capacity=16)
    model.update(random_params(MIXED, 1, mesh))
    with pytest.raises(ValueError, match=r"updated after this text was begun.*start anew"):
        list(chunks)
    with pytest.raises(ValueError, match=r"consumed by LanguageModel\.update; use the model's weights"):
        muse_jax.decode.decode_step(old, state, jnp.zeros(1, jnp.int32))
    assert draft.embedding is shared[0] is not model.params["embed_tokens.weight"]
    plain, drafted = (
        muse_jax.generate(model, [1, 2, 3], max_new_tokens=12, stop_ids=(), draft=d).tokens for d in (None, draft)
    )
    assert plain == drafted


def test_an_interrupted_update_leaves_a_model(monkeypatch):
    """Ctrl-C after the first layer: the weights can be read, and the next update makes all of them right."""
    mesh = make_mesh(2)
    model = LanguageModel(MIXED, random_params(MIXED, 6, mesh), mesh)
    new = random_params(MIXED, 7, mesh)

    def interrupt(_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(jax, "block_until_ready", interrupt)
        model.update(new)
    muse_jax.generate(model, [1, 2], max_new_tokens=2)
    model.update(new)
    same_weights(model.weights, repack(MIXED, new, mesh))
