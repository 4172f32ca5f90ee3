"""What each bf16 rounding of docs/numerics.md does to the residual stream: the reason for the limits of test_hf.py.

    python tests/hf/roundings.py

An fp64 model of one layer, without any code of muse-jax, rounds at one point only, then at all of them. Printed are the
relative rms changes of the stream after the layer, their root sum of squares, and the change by all points together.
Without roundings the model is Hugging Face's within fp32 noise, which is printed first. Needs numpy, ml_dtypes,
safetensors; about 20 seconds.
"""

import json
from collections.abc import Callable
from pathlib import Path

import ml_dtypes
import numpy as np
from safetensors.numpy import load_file

FIXTURE = Path(__file__).resolve().parent.parent / "data" / "hf_tiny"
CONFIG = json.loads((FIXTURE / "config.json").read_text(encoding="utf-8"))["text_config"]
EPS, POST_EPS = CONFIG["rms_norm_eps"], CONFIG["post_norm_eps"]
WEIGHTS = {
    name.removeprefix("model.language_model."): w.astype(np.float64)
    for name, w in load_file(FIXTURE / "model.safetensors").items()
    if not name.startswith(("model.vision", "model.audio"))
}
Round = Callable[[str, np.ndarray], np.ndarray]


def norm(x: np.ndarray, eps: float) -> np.ndarray:
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps)


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def residual(s: np.ndarray, n: np.ndarray, gate: np.ndarray) -> np.ndarray:
    beta = sigmoid(gate / CONFIG["residual_gate_temperature"])
    return np.sqrt(np.maximum(1 - beta * beta, 1e-3)) * s + beta * n


def rotate(x: np.ndarray, theta: float) -> np.ndarray:
    """Split halves, as the files have the rows."""
    angle = np.arange(x.shape[1])[:, None] * theta ** (-2 * np.arange(32) / 64)
    cos, sin = np.cos(angle)[:, None], np.sin(angle)[:, None]
    a, b = x[..., :32], x[..., 32:]
    return np.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1)


def attention(i: int, w: Callable[[str], np.ndarray], h: np.ndarray, r: Round) -> np.ndarray:
    batch, length, _ = h.shape
    q, k, v, u = (r(name, h @ w(f"self_attn.{name}_proj.weight").T) for name in ("q", "k", "v", "gate"))
    q, k, v = (x.reshape(batch, length, -1, 64) for x in (q, k, v))
    q, k = r("q norm", norm(q, EPS)), r("k norm", norm(k, EPS))
    if theta := CONFIG["layer_rope_theta"][i]:
        q, k = r("q RoPE", rotate(q, theta)), r("k RoPE", rotate(k, theta))
    k, v = (np.repeat(x, q.shape[2] // k.shape[2], axis=2) for x in (k, v))
    distance = np.arange(length)[:, None] - np.arange(length)
    window = CONFIG["sliding_window"] if CONFIG["layer_types"][i] == "sliding_attention" else length
    p = r("p", np.exp(np.einsum("bqhd,bkhd->bhqk", q, k) * CONFIG["qk_scale_factor"] / 8))
    p = p * ((distance >= 0) & (distance < window))
    a = r("a", np.einsum("bhqk,bkhd->bqhd", p / p.sum(-1, keepdims=True), v))
    o = r("o", norm(a, EPS).reshape(u.shape) * sigmoid(u))
    return r("n", norm(r("y", o @ w("self_attn.o_proj.weight").T), POST_EPS))


def moe(w: Callable[[str], np.ndarray], h: np.ndarray, chosen: np.ndarray, r: Round) -> np.ndarray:
    p = np.take_along_axis(sigmoid(h @ w("mlp.gate.weight").T * CONFIG["output_multiplier"]), chosen, -1)
    e = norm(r("e", h @ w("mlp.pre_expert_proj.weight").T), EPS)
    e = r("e norm", e * r("pre-expert gain", 1 + w("mlp.pre_expert_norm.weight")))
    gate, up = np.split(np.einsum("btm,enm->bten", e, w("mlp.experts.gate_up_proj")), 2, axis=-1)
    m = r("m", gate * sigmoid(gate) * up)
    f = r("f", np.einsum("bten,emn->btem", m, w("mlp.experts.down_proj")))
    f = norm(f * r("post-expert gain", 1 + w("mlp.experts.post_expert_norm.weight")), POST_EPS)
    c = p / p.sum(-1, keepdims=True)
    x = r("x", (np.take_along_axis(f, chosen[..., None], 2) * c[..., None]).sum(2))
    y = r("MoE y", x @ w("mlp.post_expert_proj.weight").T)
    z = r("z", y * r("post-FFN gain", 1 + w("post_feedforward_layernorm.weight")))
    return r("MoE n", norm(z, POST_EPS))


def layer(i: int, s: np.ndarray, chosen: np.ndarray, r: Round) -> np.ndarray:
    def w(name: str) -> np.ndarray:
        return WEIGHTS[f"layers.{i}.{name}"]

    h = r("h", norm(s, EPS) * r("input gain", 1 + w("input_layernorm.weight")))
    s = residual(s, attention(i, w, h, r), w("post_attention_residual_gate.gate"))
    h = r("MoE h", norm(s, EPS) * r("pre-FFN gain", 1 + w("pre_feedforward_layernorm.weight")))
    return residual(s, moe(w, h, chosen, r), w("post_feedforward_residual_gate.gate"))


def main() -> None:
    oracle = np.load(FIXTURE / "oracle.npz")
    hidden = oracle["fp32/hidden"].astype(np.float64)
    for i in range(CONFIG["num_hidden_layers"]):
        chosen = oracle["fp32/selected"][i].reshape(*hidden.shape[1:3], -1)
        points: list[str] = []

        def collect(name: str, x: np.ndarray, points: list[str] = points) -> np.ndarray:
            points.append(name)
            return x

        exact = layer(i, hidden[i], chosen, collect)

        def change(only: str | None, i=i, chosen=chosen, exact=exact) -> float:
            def r(name: str, x: np.ndarray) -> np.ndarray:
                return x.astype(ml_dtypes.bfloat16).astype(np.float64) if only in (None, name) else x

            return float(np.linalg.norm(layer(i, hidden[i], chosen, r) - exact) / np.linalg.norm(exact))

        noise = np.linalg.norm(exact - hidden[i + 1]) / np.linalg.norm(exact)
        print(f"layer {i}: {noise:.1e} from Hugging Face; {len(points)} rounding points")
        alone = {point: change(point) for point in points}
        for point, value in alone.items():
            print(f"  {point:20s} {value:.2e}")
        print(f"  root sum of squares  {np.linalg.norm(list(alone.values())):.2e}")
        print(f"  all together         {change(None):.2e}")


if __name__ == "__main__":
    main()
