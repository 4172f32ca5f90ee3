"""The expert-parallel reference: bit for bit against the NumPy oracle, on every mesh; causality; gradients."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import twin
from oracle import model as oracle
from oracle import quant

from muse_jax.config import MuseSparkConfig
from muse_jax.mesh import make_mesh
from muse_jax.model import MuseSpark, Reference, build, params_of
from muse_jax.model.reference import _run
from muse_jax.weights import parameter_specs, random_params

SLIDING, FULL = "sliding_attention", "full_attention"


def small(**changes) -> MuseSparkConfig:
    """Two layers, one of each kind and format, in the smallest sizes."""
    values = dict(
        vocab_size=64, hidden_size=128, num_hidden_layers=2, num_attention_heads=8, num_key_value_heads=8,
        moe_hidden_size=128, moe_intermediate_size=128, num_local_experts=8, num_experts_per_tok=2, sliding_window=5,
        layer_types=(SLIDING, FULL), layer_rope_theta=(500000.0, 0.0), expert_formats=("bf16", "nvfp4"),
        max_position_embeddings=64, bos_token_id=1, eos_token_ids=(2,), pad_token_id=None,
    )  # fmt: skip
    return MuseSparkConfig.tiny().replace(**values | changes)


def drawn(seed: int) -> tuple[MuseSparkConfig, np.ndarray]:
    """A random configuration with a few random tokens."""
    rng = np.random.default_rng(seed)
    layers, key_heads = int(rng.integers(2, 4)), 8
    base = float(rng.choice([10000.0, 500000.0]))
    config = small(
        hidden_size=int(rng.choice([128, 256])), num_hidden_layers=layers,
        num_attention_heads=key_heads * int(rng.integers(1, 3)),
        moe_hidden_size=int(rng.choice([128, 256])), moe_intermediate_size=int(rng.choice([128, 256])),
        num_local_experts=8 * int(rng.integers(1, 3)), num_experts_per_tok=int(rng.integers(1, 6)),
        sliding_window=int(rng.integers(1, 12)),
        layer_types=tuple(rng.permutation(([SLIDING, FULL] * 2)[:layers]).tolist()),
        layer_rope_theta=tuple(rng.permutation([base, 0.0, base][:layers]).tolist()),
        expert_formats=tuple(rng.permutation((["bf16", "nvfp4"] * 2)[:layers]).tolist()),
        activation_format="bf16" if seed % 2 else "nvfp4", routed_scaling_factor=float(rng.choice([1.0, 2.5])),
        residual_gate_temperature=float(rng.choice([0.3, 1.0])),
    )  # fmt: skip
    return config, rng.integers(0, config.vocab_size, (2, int(rng.integers(13, 30))))


def reference(config: MuseSparkConfig, devices: int) -> Reference:
    return Reference(config, make_mesh(devices))


def same(x, y) -> bool:
    x, y = np.asarray(x), np.asarray(y)
    return x.dtype == y.dtype and x.shape == y.shape and x.tobytes() == y.tobytes()


def host(params) -> dict[str, np.ndarray]:
    return {name: np.asarray(array) for name, array in params.items()}


def quantised(config: MuseSparkConfig, weights: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Masters -> what the oracle reads: codes and scales, by the oracle's own quantiser, without input scales."""
    weights = dict(weights)
    for i, kind in enumerate(config.expert_formats):
        for name in ("gate_up_proj", "down_proj"):
            key = f"layers.{i}.mlp.experts.{name}"
            if kind == "nvfp4":
                experts, rows, columns = weights[key].shape
                halves = 2 if name == "gate_up_proj" else 1
                parts = [quant.quantise_weights(w) for w in weights[key].reshape(-1, rows // halves, columns)]
                codes, scales, scale_2 = (np.stack(x) for x in zip(*parts, strict=True))
                weights[key] = codes.reshape(experts, rows, columns // 2)
                weights[key + "_weight_scale"] = scales.reshape(experts, rows, columns // 16)
                weights[key + "_weight_scale_2"] = scale_2.reshape((experts, 2) if halves == 2 else (experts,))
    return weights


def assert_oracle(config: MuseSparkConfig, weights: dict[str, np.ndarray], tokens: np.ndarray, taps) -> None:
    taps = host(taps)
    for b, sequence in enumerate(tokens):
        expected = oracle.forward(config, weights, sequence)
        assert taps.keys() == expected.keys()
        different = [name for name, value in expected.items() if not same(taps[name][b], value)]
        assert not different, f"sequence {b}: {different}"


# Bits ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("seed", "devices"),
    [(0, 1), (1, 2), (2, 4), (3, 8), *(pytest.param(seed, 8, marks=pytest.mark.slow) for seed in (4, 5))],
)
def test_oracle(seed, devices):
    config, tokens = drawn(seed)
    params = random_params(config, seed, make_mesh(devices), quantized=True)
    assert_oracle(config, host(params), tokens, reference(config, devices).taps(params, tokens))


def test_programs_are_shared():
    """A second reference of the same model compiles nothing."""
    params, tokens = random_params(small(), 0, make_mesh(8), quantized=True), np.arange(8)[None]
    first = reference(small(), 8).log_probs(params, tokens)
    compiled = _run._cache_size()
    assert same(reference(small(), 8).log_probs(params, tokens), first) and _run._cache_size() == compiled


@pytest.mark.parametrize("activation_format", ["nvfp4", "bf16"])
def test_masters_against_oracle(activation_format):
    config = small(activation_format=activation_format)
    tokens = np.random.default_rng(6).integers(0, config.vocab_size, (1, 9))
    params = random_params(config, 6, make_mesh(8))
    weights = quantised(config, host(params))
    assert_oracle(config, weights, tokens, reference(config, 8).taps(params, tokens))


def test_every_mesh_gives_the_same_bytes():
    config, tokens = drawn(7)
    results = []
    for devices in (1, 2, 4, 8):
        params = random_params(config, 7, make_mesh(devices), quantized=True)
        taps = reference(config, devices).taps(params, tokens)
        results.append(host(taps | {"log_probs": reference(config, devices).log_probs(params, tokens)}))
    for other in results[1:]:
        assert all(same(results[0][name], other[name]) for name in results[0])
    logits = results[0]["logits"][:, :-1]
    assert same(results[0]["log_probs"], oracle.log_prob(logits, tokens[:, 1:]))


def test_padding_and_causality():
    """The first t rows' bits depend neither on later tokens nor on their number (so neither on padding)."""
    config = small()
    rng = np.random.default_rng(8)
    tokens = rng.integers(0, config.vocab_size, (2, 17))
    params = random_params(config, 8, make_mesh(8), quantized=True)
    run = reference(config, 8)
    full = run.taps(params, tokens)
    for length in (1, 7, 8, 9, 16):
        short = run.taps(params, tokens[:, :length])
        assert all(same(short[name], np.asarray(full[name])[:, :length]) for name in full), length
    changed = tokens.copy()
    changed[:, 9:] = rng.integers(0, config.vocab_size, (2, 8))
    other = run.taps(params, changed)
    assert all(same(np.asarray(other[name])[:, :9], np.asarray(full[name])[:, :9]) for name in full)
    assert not same(other["logits"], full["logits"])


@pytest.mark.parametrize("bad", [0x7FFF, 0xFFA5, 0x7F80])
def test_nan_stays_where_it_is_seen(bad):
    """A NaN or infinite embedding row, in sequence 1 only: rows that see it are NaN, all others keep their bits."""
    config = small(layer_types=(SLIDING, SLIDING), layer_rope_theta=(500000.0, 500000.0), sliding_window=3)
    rng = np.random.default_rng(9)
    tokens = rng.integers(1, config.vocab_size - 1, (2, 21))
    token, place = config.vocab_size - 1, 10
    tokens[1, place] = token
    params = random_params(config, 9, make_mesh(8), quantized=True)
    run = reference(config, 8)
    table = np.array(params["embed_tokens.weight"])
    clean = host(run.taps(params, tokens))
    # Token 0 occurs in no sequence, but padding has to have some id.
    table.view(np.uint16)[[0, token]] = bad
    broken = params | {"embed_tokens.weight": jnp.asarray(table)}
    taps = host(run.taps(broken, tokens))
    seen = place + np.arange(2 * (config.sliding_window - 1) + 1)
    for name, value in taps.items():
        rows = np.ones(tokens.shape, bool)
        rows[1, seen] = False
        assert same(value[rows], clean[name][rows]), name
    assert np.isnan(taps["logits"][1, seen]).all() and np.isnan(taps["embedding"][1, place]).all()
    assert_oracle(config, host(broken), tokens[1:], {name: value[1:] for name, value in taps.items()})


def test_subnormals_are_kept():
    config = small(expert_formats=("bf16", "bf16"))
    rng = np.random.default_rng(16)
    tokens = rng.integers(0, config.vocab_size, (1, 11))
    params = dict(random_params(config, 16, make_mesh(8)))
    for name, columns in (("embed_tokens.weight", slice(3, 60)), ("layers.1.self_attn.v_proj.weight", slice(None))):
        w = np.array(params[name])
        w[:, columns] = (w[:, columns].astype(np.float32) * np.float32(2.0**-123)).astype(w.dtype)
        params[name] = jnp.asarray(w)
    taps = reference(config, 8).taps(params, tokens)
    for name in ("embedding", "layers.1.v"):
        x = np.abs(np.asarray(taps[name]).astype(np.float64))
        assert np.count_nonzero((x > 0) & (x < 2.0**-126)) > 20, name
    assert_oracle(config, host(params), tokens, taps)


def test_unknown_token_under_jit_is_nan():
    config = small()
    params = random_params(config, 10, make_mesh(8))
    run = jax.jit(reference(config, 8).forward)
    logits = np.asarray(run(params, jnp.array([[3, 4, config.vocab_size, 5], [3, -1, 5, 6]])))
    assert np.isnan(logits).all(-1).tolist() == [[False, False, True, True], [False, True, True, True]]


# Interface -----------------------------------------------------------------------------------------------------------


def test_module_and_params_are_two_views_of_the_same_arrays():
    config = small()
    for quantized in (False, True):
        params = random_params(config, 11, make_mesh(1), quantized=quantized)
        module = build(config, params)
        assert isinstance(module, MuseSpark)
        assert module.layers[1].self_attn.q_proj.weight[...] is params["layers.1.self_attn.q_proj.weight"]
        found = params_of(module)
        assert found.keys() == params.keys() and all(found[name] is params[name] for name in params)


def test_declared_shapes_are_those_of_the_table():
    config, _ = drawn(12)
    for stored in (config.expert_formats, ("bf16",) * config.num_hidden_layers):
        module = MuseSpark(config, [kind == "nvfp4" for kind in stored])
        declared = {name: (x.shape, x.dtype) for name, x in params_of(module).items()}
        assert declared == {name: (s.shape, s.dtype) for name, s in parameter_specs(config, stored).items()}


def test_wrong_parameters():
    config = small()
    run = reference(config, 1)
    params = random_params(config, 13, make_mesh(1))
    with pytest.raises(ValueError, match="at least \\[1, 2\\]"):
        run.log_probs(params, [[1]])
    with pytest.raises(ValueError, match=r"norm\.weight: missing"):
        run.forward({k: v for k, v in params.items() if k != "norm.weight"}, [[1]])
    with pytest.raises(ValueError, match=r"norm\.weight: missing"):
        build(config, {k: v for k, v in params.items() if k != "norm.weight"})
    with pytest.raises(ValueError, match=r"norm\.weight: expected bfloat16 \[128\], found float32"):
        run.forward(params | {"norm.weight": jnp.zeros(128)}, [[1]])


def test_parameters_of_another_mesh():
    with pytest.raises(ValueError, match="incompatible devices"):
        reference(small(), 8).forward(random_params(small(), 13, make_mesh(1)), [[1]])


# Gradients -----------------------------------------------------------------------------------------------------------


def gradients(config: MuseSparkConfig, devices: int, params, tokens) -> dict[str, np.ndarray]:
    run = reference(config, devices)
    grad = jax.jit(jax.grad(lambda p: -jnp.mean(run.log_probs(p, tokens))))(params)
    return {name: np.asarray(g).astype(np.float64) for name, g in grad.items()}


def likeness(x: np.ndarray, y: np.ndarray) -> float:
    """1 - |x - y| / |y|, so that a wrong factor shows as well as a wrong direction."""
    return 1 - np.linalg.norm(x - y) / max(np.linalg.norm(y), 1e-30)


@pytest.fixture(scope="module")
def gradient_case():
    config = small(activation_format="bf16")  # W4A16: rounding noise stays small
    tokens = np.random.default_rng(14).integers(0, config.vocab_size, (2, 13))
    return config, tokens, gradients(config, 8, random_params(config, 14, make_mesh(8)), tokens)


def test_gradients_on_8_devices_are_those_on_1(gradient_case):
    config, tokens, on_8 = gradient_case
    on_1 = gradients(config, 1, random_params(config, 14, make_mesh(1)), tokens)
    assert on_8.keys() == on_1.keys()
    for name, g in on_1.items():
        if "e_score_correction_bias" in name:
            assert not g.any() and not on_8[name].any()
        else:
            assert np.isfinite(g).all() and g.any(), name
            assert likeness(on_8[name], g) > 0.98, (name, likeness(on_8[name], g))


def test_gradients_are_those_of_a_smooth_model(gradient_case):
    """Against an fp32 model in plain jax.numpy with the same routing, and that one against finite differences."""
    config, tokens, found = gradient_case
    params = random_params(config, 14, make_mesh(1))
    taps = reference(config, 1).taps(params, tokens)
    routing = [np.asarray(taps[f"layers.{i}.router_experts"]) for i in range(config.num_hidden_layers)]
    weights = {name: jnp.asarray(w.astype(np.float32)) for name, w in host(params).items()}
    codes = quantised(config, host(params))
    for name in ("layers.1.mlp.experts.gate_up_proj", "layers.1.mlp.experts.down_proj"):
        weights[name] = jnp.asarray(twin.dequantised(codes, name))

    loss = jax.jit(lambda w: -jnp.mean(twin.log_probs(config, w, tokens, routing)))
    smooth = jax.jit(jax.grad(loss))(weights)
    for name, g in smooth.items():
        if "e_score_correction_bias" not in name:
            assert likeness(found[name], np.asarray(g)) > 0.96, (name, likeness(found[name], np.asarray(g)))

    rng = np.random.default_rng(15)
    for name in ("embed_tokens.weight", "layers.0.mlp.gate.weight", "layers.1.self_attn.k_proj.weight"):
        direction = rng.standard_normal(weights[name].shape) * np.sign(np.asarray(smooth[name]))
        direction = jnp.asarray(np.abs(direction) * np.sign(np.asarray(smooth[name])), jnp.float32)
        step = 1e-3 / jnp.linalg.norm(direction) * jnp.linalg.norm(weights[name])
        up, down = (loss(weights | {name: weights[name] + sign * step * direction}) for sign in (1, -1))
        slope = float(jnp.vdot(smooth[name], direction))
        assert abs(float((up - down) / (2 * step)) - slope) < 0.02 * abs(slope), name


def test_gradients_through_codes_and_taps():
    """Experts stored as codes pass the gradient on and have none themselves; taps can be differentiated too."""
    config = small()
    tokens = np.random.default_rng(17).integers(0, config.vocab_size, (1, 13))
    params = random_params(config, 17, make_mesh(8), quantized=True)
    run = reference(config, 8)

    def objective(p):
        return jnp.sum(run.log_probs(p, tokens)) + jnp.sum(run.taps(p, tokens)["layers.1.v"].astype(jnp.float32))

    gradient = host(jax.jit(jax.grad(objective, allow_int=True))(params))
    for name, g in gradient.items():
        if g.dtype == jax.dtypes.float0:
            assert params[name].dtype == jnp.uint8
        elif "_scale" in name or "e_score_correction_bias" in name:
            assert not g.any(), name
        else:
            assert np.isfinite(g.astype(np.float32)).all() and g.any(), name
