"""What a profile calls things: every custom call on the devices, every phase of the host."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from decode_helpers import small

import muse_jax
from muse_jax import LanguageModel, make_mesh
from muse_jax.decode.weights import SPECS
from muse_jax.loop import advance
from muse_jax.weights import random_params, refit

CALL = re.compile(r'custom_call_target="(muse_\w+)_v1".*?op_name="([^"]*)"')


@pytest.fixture(scope="module")
def model():
    mesh = make_mesh(2)
    return LanguageModel(small(), random_params(small(), 3, mesh), mesh)


def stream(model):
    return muse_jax.stream(
        model, [1, 2, 3], max_new_tokens=9, stop_ids=(), sampling=muse_jax.Sampling(top_k=5), keys=jax.random.key(0)
    )


def compiled_step(model):
    return jax.jit(muse_jax.decode.decode_step).lower(model.weights, model.init_state(capacity=16), jnp.zeros(1, int))


def compiled_loop(model):
    begun = stream(model)
    return advance.lower(
        begun._weights, begun._state, begun._kept, begun._stops, begun._choice, begun._draft, begun._carry, np.int32(4)
    )


def compiled_reference(model):
    return jax.jit(model.reference).lower(jnp.zeros((1, 8), jnp.int32))


def compiled_update(model):
    layer, own = next(part for part in refit.by_layer(model.params) if part[0] is not None)
    arrays = {name: getattr(model.weights, name) for name in SPECS}
    program, operands = refit.program(model.config, model.mesh, arrays, own, layer)
    return program.lower(*operands)


@pytest.mark.parametrize(
    ("program", "phases"),
    [
        (compiled_step, {"muse_decode_layers"}),
        (compiled_loop, {"muse_step", "muse_decode_layers", "muse_sampling"}),
        (compiled_reference, {"muse_reference", "layers.0.attention", "layers.1.moe", "muse_expert_ffn", "muse_head"}),
        (compiled_update, {"muse_update", "muse_quantize_weight"}),
    ],
)
def test_names_on_the_devices(model, program, phases):
    """Each custom call lies in a scope of its own name, and the phases around it are there."""
    text = program(model).compile().as_text()
    calls = CALL.findall(text)
    assert len(calls) == text.count('custom_call_target="muse_') > 0
    for target, path in calls:
        assert target in path.split("/"), (target, path)
    assert phases <= {part for path in re.findall(r'op_name="([^"]*)"', text) for part in path.split("/")}


def test_names_on_the_host(model, tmp_path):
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0
    with jax.profiler.trace(str(tmp_path), profiler_options=options):
        list(stream(model))
        state = model.init_state(capacity=16)
        _, state = model.prefill_whole(state, [1, 2])
        model.decode_step(state, [3])
        model.reference_taps([[1, 2]])
        model.update(model.params)
    (path,) = tmp_path.rglob("*.xplane.pb")
    events = {
        event.name
        for plane in jax.profiler.ProfileData.from_file(str(path)).planes
        for line in plane.lines
        for event in line.events
    }
    assert events >= {
        "muse_prefill", "muse_steps", "muse_look", "muse_prefill_whole", "muse_decode_step", "muse_reference",
        "muse_update",
    }  # fmt: skip
