"""Loading into the decode layout alone: the bytes of `repack`, a layer's memory, every problem in one error."""

import jax
import numpy as np
import pytest
from weight_helpers import SMALL

import muse_jax
from muse_jax import weights
from muse_jax.decode.weights import SPECS
from muse_jax.errors import CheckpointError
from muse_jax.mesh import make_mesh
from muse_jax.weights import loading, packed
from muse_jax.weights.repack import decode_shapes

MIXED = SMALL.replace(
    num_hidden_layers=4, layer_types=("sliding_attention", "full_attention") * 2, layer_rope_theta=(500000.0, 0.0) * 2,
    expert_formats=("bf16", "nvfp4", "nvfp4", "bf16"),
)  # fmt: skip


@pytest.fixture(scope="module", params=["codes", "masters", "safetensors"])
def folder(request, tmp_path_factory):
    path = tmp_path_factory.mktemp("packed") / "model"
    mesh = make_mesh()
    params = weights.random_params(MIXED, 5, mesh, quantized=request.param != "masters")
    if request.param == "safetensors":
        weights.export_hf(path, MIXED, params, None)
    else:
        weights.save(path, MIXED, params, None)
    return path


@pytest.mark.parametrize("devices", [1, 2, 8])
def test_bytes_are_those_of_repack(folder, devices):
    mesh = make_mesh(devices)
    whole, alone = (muse_jax.load(folder, mesh=mesh, reference=reference) for reference in (True, False))
    for name in SPECS:
        a, b = getattr(whole.weights, name), getattr(alone.weights, name)
        if name == "ranks":  # the second column numbers the packings
            continue
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        assert a.sharding.is_equivalent_to(b.sharding, a.ndim)
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes(), name


def test_no_more_than_a_layer_beside_them(folder, monkeypatch):
    """Live bytes right after each part has been read: the decode layout, and the largest part so far."""
    parts, live = [], []
    before = sum(x.nbytes for x in jax.live_arrays())

    def counted(source, *args):
        params = loading.load_source(source, *args)
        parts.append(sum(x.nbytes for x in params.values()))
        live.append(sum(x.nbytes for x in jax.live_arrays()) - before)
        return params

    monkeypatch.setattr(packed, "load_source", counted)
    model = muse_jax.load(folder, mesh=make_mesh(), reference=False)
    decode_bytes = sum(x.size * x.dtype.itemsize for x in decode_shapes(MIXED).values())
    assert len(parts) == 1 + MIXED.num_hidden_layers
    assert max(live) <= decode_bytes + parts[0] + max(parts[1:]) + 4096
    assert sorted(model.params) == ["embed_tokens.weight", "lm_head.weight", "norm.weight"]


def test_decodes_but_has_no_reference(folder):
    whole, alone = (muse_jax.load(folder, mesh=make_mesh(), reference=reference) for reference in (True, False))
    prompt = [1, 2, 3]
    made = [muse_jax.generate(model, prompt, max_new_tokens=4, stop_ids=()).tokens for model in (whole, alone)]
    assert made[0] == made[1]
    calls = [
        lambda: alone.reference(np.array([prompt])), lambda: alone.log_probs(np.array([prompt])),
        lambda: alone.prefill_whole(alone.init_state(capacity=16), prompt), lambda: muse_jax.parity(alone, prompt),
    ]  # fmt: skip
    for call in calls:
        with pytest.raises(ValueError, match="loaded with reference=False"):
            call()


def test_problems_of_all_layers(tmp_path):
    """A NaN in two layers: both are named, as `load` names them."""
    params = dict(weights.random_params(MIXED, 5, make_mesh()))
    for layer in (0, 3):
        name = f"layers.{layer}.input_layernorm.weight"
        params[name] = params[name].at[2].set(np.nan)
    weights.export_hf(tmp_path / "model", MIXED, params, None)
    told = []
    for reference in (True, False):
        with pytest.raises(CheckpointError, match="cannot") as raised:
            muse_jax.load(tmp_path / "model", mesh=make_mesh(), reference=reference)
        told.append(sorted(raised.value.problems))
    assert told[0] == told[1] and len(told[0]) == 2
