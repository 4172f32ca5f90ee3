"""The weight-bound parts of one rank's layer in PyTorch under a CUDA graph, for baselines.py. Imports no JAX.

The dense products (qkvu, o_proj, router, pre_expert, post_expert) and one MoE layer with bf16 experts. Left out:
attention, norms, gates, routing and its bookkeeping (which rows go to which expert is known when the graph is
captured), and all exchanges. So a real PyTorch step is slower than the sum.
"""

import dataclasses
import importlib
import statistics
from collections.abc import Callable
from typing import Any

import numpy as np


@dataclasses.dataclass(frozen=True)
class Sizes:
    """One rank's share of a layer."""

    hidden: int
    qkvu: int
    q: int
    moe_hidden: int
    inner: int
    experts: int
    router: int


class TorchLayer:
    """Random weights of one layer, and buffers for its products."""

    def __init__(self, torch: Any, sizes: Sizes, chosen: np.ndarray, device: Any, seed: int):
        """`chosen` int [T, K]: each row's experts."""
        generator = torch.Generator(device=device).manual_seed(seed)

        def weight(*shape: int, dtype: Any = torch.bfloat16) -> Any:
            made = torch.empty(shape, dtype=dtype, device=device)
            return made.normal_(0, shape[-1] ** -0.5, generator=generator)

        self.torch, s = torch, sizes
        rows, slots = chosen.shape
        self.dense = [
            (weight(s.qkvu, s.hidden), weight(rows, s.hidden)), (weight(s.hidden, s.q), weight(rows, s.q)),
            (weight(s.router, s.hidden, dtype=torch.float32), weight(rows, s.hidden, dtype=torch.float32)),
            (weight(s.moe_hidden // 8, s.hidden), weight(rows, s.hidden)),
            (weight(s.hidden, s.moe_hidden // 8), weight(rows, s.moe_hidden // 8)),
        ]  # fmt: skip
        self.w13 = weight(s.experts, 2 * s.inner, s.moe_hidden)
        self.w2 = weight(s.experts, s.moe_hidden, s.inner)
        self.e = weight(rows, s.moe_hidden)
        # The pairs sorted by expert: the row of each, and every used expert's run of them.
        pairs = chosen.reshape(-1)
        order = np.argsort(pairs, kind="stable")
        self.row = torch.from_numpy(order // slots).to(device)
        counts = np.bincount(pairs, minlength=s.experts)
        ends = np.cumsum(counts)
        self.runs = [(int(x), int(ends[x] - counts[x]), int(ends[x])) for x in np.flatnonzero(counts)]
        self.offsets = torch.from_numpy(ends.astype(np.int32)).to(device)
        self.gate_up = torch.empty((len(pairs), 2 * s.inner), dtype=torch.bfloat16, device=device)
        self.f = torch.empty((len(pairs), s.moe_hidden), dtype=torch.bfloat16, device=device)

    def run_dense(self) -> list[Any]:
        """The dense products."""
        return [self.torch.nn.functional.linear(x, w) for w, x in self.dense]

    def _swiglu(self, gate_up: Any) -> Any:
        gate, up = gate_up.chunk(2, dim=-1)
        return self.torch.nn.functional.silu(gate) * up

    def run_experts_apart(self) -> Any:
        """Two products for every expert in use -> [pairs, M], sorted by expert."""
        x = self.e[self.row]
        for expert, begin, end in self.runs:
            self.torch.mm(x[begin:end], self.w13[expert].T, out=self.gate_up[begin:end])
        hidden = self._swiglu(self.gate_up)
        for expert, begin, end in self.runs:
            self.torch.mm(hidden[begin:end], self.w2[expert].T, out=self.f[begin:end])
        return self.f

    def run_experts_grouped(self) -> Any:
        """PyTorch's grouped product over all experts at once -> [pairs, M], sorted by expert."""
        functional = self.torch.nn.functional
        grouped = getattr(functional, "grouped_mm", None) or self.torch._grouped_mm
        gate_up = grouped(self.e[self.row], self.w13.transpose(-2, -1), offs=self.offsets)
        return grouped(self._swiglu(gate_up), self.w2.transpose(-2, -1), offs=self.offsets)


def graph_seconds(torch: Any, run: Callable[[], Any], repeats: int) -> float:
    """Median seconds of one replay of `run` captured as a CUDA graph."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    times = []
    for _ in range(repeats + 2):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e-3)
    return statistics.median(times[2:])


def measure(sizes: Sizes, chosen: np.ndarray, ordinal: int, repeats: int) -> dict[str, float | str]:
    """Seconds of one layer by what was run, or why it was not; chosen int [layers, T, K].

    All layers are in one graph, so that none finds its weights in the cache.
    """
    try:
        torch: Any = importlib.import_module("torch")
    except ImportError:
        return {"PyTorch": "torch is not installed"}
    if not torch.cuda.is_available():
        return {"PyTorch": "this torch sees no GPU"}
    results: dict[str, float | str] = {}
    with torch.inference_mode(), torch.cuda.device(ordinal):
        layers = [TorchLayer(torch, sizes, c, torch.device("cuda", ordinal), i) for i, c in enumerate(chosen)]
        for name, method in (
            ("PyTorch graph: dense products", TorchLayer.run_dense),
            ("PyTorch graph: MoE, expert by expert", TorchLayer.run_experts_apart),
            ("PyTorch graph: MoE, grouped_mm", TorchLayer.run_experts_grouped),
        ):
            try:
                if method is TorchLayer.run_experts_grouped:
                    check_same(layers[0])
                seconds = graph_seconds(torch, lambda method=method: [method(layer) for layer in layers], repeats)
                results[name] = seconds / len(layers)
            except Exception as error:
                results[name] = f"failed: {type(error).__name__}: {str(error).splitlines()[0][:160]}"
    return results


def check_same(layer: TorchLayer) -> None:
    """Both ways through the experts compute the same."""
    apart, grouped = layer.run_experts_apart().float().clone(), layer.run_experts_grouped().float()
    difference = float((apart - grouped).norm() / apart.norm())
    if not difference < 0.02:
        raise ArithmeticError(f"grouped_mm differs from the products one by one by {difference:.3g}")
