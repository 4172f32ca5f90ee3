"""What a decode step launches, counted by a profiler, and whether a loop of steps really is one CUDA graph."""

import collections
import functools
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import gpu_helpers as helpers
import jax
import numpy as np
import pytest

from muse_jax import decode

CONFIG = helpers.small_config()
ARRAYS = helpers.random_arrays(CONFIG, 0)
STEPS, LOOP = 5, 400
OURS = ("decode_layers", "decode_head")
# XLA's names for its fusions. In the step: the unread stream operand's zeros, the committed length plus one.
XLA = re.compile(r"(loop|input|wrapped)_\w+")
MOVES = re.compile(r"mem(cpy|set)", re.IGNORECASE)


def device_events(folder: Path) -> dict[str, collections.Counter]:
    """Device plane -> name -> number of events on its streams, from the profile in a folder."""
    [path] = folder.rglob("*.xplane.pb")
    found = {}
    for plane in jax.profiler.ProfileData.from_file(str(path)).planes:
        if not plane.name.startswith("/device:GPU:"):
            continue
        counts = collections.Counter()
        for line in plane.lines:
            if line.name.startswith("Stream"):  # other lines repeat the events by module and by operation
                counts.update(short(event.name) for event in line.events)
        if counts:
            found[plane.name] = counts
    return found


def short(name: str) -> str:
    """A kernel's name without namespace and parameters; the profiler may or may not demangle it."""
    return next((ours for ours in OURS if ours in name), name)


def table(found: dict[str, collections.Counter], steps: int) -> str:
    rows = [
        f"{plane:16}{name:40}{count:8}{count / steps:10.1f}"
        for plane, counts in found.items()
        for name, count in counts.most_common()
    ]
    return "\n".join([f"{'device':16}{'kernel, copy or memset':40}{'events':>8}{'per step':>10}", *rows])


def test_launches_per_step(gpus, tmp_path):
    """One kernel of ours on every device, and two small ones of XLA's.

    XLA runs graphs operation by operation while a profiler is active, so what it sees is all that there is.
    """
    weights = helpers.placed(CONFIG, ARRAYS, gpus)
    output, state = helpers.start(weights)
    for _ in range(3):  # compiled and warm
        output, state = helpers.single_step(weights, state, output.token)
    jax.block_until_ready(output)
    with jax.profiler.trace(str(tmp_path)):
        for _ in range(STEPS):
            output, state = helpers.single_step(weights, state, output.token)
        jax.block_until_ready((output, state))
    found = device_events(tmp_path)
    print("\n" + table(found, STEPS))
    assert len(found) == len(gpus), f"the profile shows work on {sorted(found)}"
    for plane, counts in found.items():
        assert {name: counts[name] for name in OURS} == {"decode_layers": STEPS, "decode_head": 0}, plane
        others = {n: c for n, c in counts.items() if n not in OURS and not MOVES.search(n)}
        assert all(XLA.fullmatch(n) for n in others), others
        assert sum(others.values()) <= 2 * STEPS, others


# One graph -----------------------------------------------------------------------------------------------------------


def custom_calls(thunks) -> list[list[str]]:
    """For every custom call: the kinds of thunks that enclose it, outside in."""
    enclosing: list[tuple[int, str]] = []
    found = []
    for depth, kind, _ in thunks:
        enclosing = [(d, k) for d, k in enclosing if d < depth]
        if kind == "CustomCall":
            found.append([k for _, k in enclosing])
        enclosing.append((depth, kind))
    return found


@functools.cache
def looped_on_the_host() -> list[np.ndarray]:
    weights = helpers.placed(CONFIG, ARRAYS, jax.devices("cpu")[:1])
    output, state = helpers.start(weights, capacity=512)
    state, token = jax.jit(helpers.until)(weights, state, output.token, 3 + LOOP)
    return [np.asarray(token), *helpers.caches(state)]


@pytest.mark.parametrize("graph", [False, True])
def test_while_loop_is_one_graph(gpus, tmp_path, graph, same_bytes):
    """With GRAPH_OPTIONS the loop, its condition included, lies in a command buffer, and a call returns at once.

    Without them the host asks the device for the condition before every step.
    """
    options = (decode.GRAPH_OPTIONS if graph else {}) | helpers.dump_to(tmp_path)
    weights = helpers.placed(CONFIG, ARRAYS, gpus)
    run = jax.jit(helpers.until, donate_argnames=("state",), compiler_options=options)
    seconds, found = [], None
    for _ in range(4):  # the first runs operation by operation, the second records the graph
        output, state = helpers.start(weights, capacity=512)
        jax.block_until_ready((output, state))
        begin = time.perf_counter()
        found = run(weights, state, output.token, 3 + LOOP)
        dispatched = time.perf_counter() - begin
        jax.block_until_ready(found)
        seconds.append((dispatched, time.perf_counter() - begin))
    weights.communicator.check()
    dispatched, whole = min(seconds[2:])
    print(
        f"\ngraph {graph}: returned after {dispatched * 1e3:.1f} ms of {whole * 1e3:.1f}, {whole / LOOP * 1e6:.0f} us"
    )

    same_bytes([found[1], *helpers.caches(found[0])], looped_on_the_host())
    calls = custom_calls(helpers.thunks(tmp_path, "until"))
    assert len(calls) == 1
    assert all((call == ["CommandBuffer", "While"]) == graph and "While" in call for call in calls), calls
    assert (dispatched < whole / 2) == graph


def test_generate_records_a_while_node():
    """In a process that logs what it adds to CUDA graphs: `generate` adds a WHILE node."""
    environment = os.environ | {"TF_CPP_MIN_LOG_LEVEL": "0", "TF_CPP_VMODULE": "cuda_command_buffer=2"}
    script = Path(__file__).with_name("loop_script.py")
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, env=environment, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    print(done.stdout)
    assert "same text" in done.stdout
    nodes = re.findall(r"Add conditional node to a graph .*?; type: k?(\w+)", done.stderr)
    assert {node.upper() for node in nodes} == {"WHILE"}
