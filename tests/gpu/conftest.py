"""GPU tests run on whatever GPUs are there (`make test-gpu`) and compare with the CPU: JAX_PLATFORMS=cuda,cpu."""

import collections
from pathlib import Path

import jax
import numpy as np
import pytest


def pytest_sessionstart():
    try:
        jax.devices("gpu")
    except RuntimeError as error:
        pytest.exit(f"tests/gpu: JAX sees no GPU ({str(error).splitlines()[0]})", returncode=2)


@pytest.fixture(scope="session")
def gpu():
    return jax.devices("gpu")[0]


@pytest.fixture(params=[1, 2])
def gpus(request):
    """As many GPUs; 8 ranks on one, 4 on each of two."""
    if len(jax.devices("gpu")) < request.param:
        pytest.skip(f"needs {request.param} GPUs")
    return jax.devices("gpu")[: request.param]


def _differing(a, b):
    assert (a.dtype, a.shape) == (b.dtype, b.shape)
    a, b = (np.ascontiguousarray(x).reshape(-1).view(np.uint8) for x in (a, b))
    return int((a != b).sum())


@pytest.fixture
def tally(record_property):
    """tally(found, expected) -> differing bytes of two equally shaped trees of arrays, by array; for the summary."""

    def count(found, expected):
        pairs = list(zip(*([np.asarray(x) for x in jax.tree.leaves(side)] for side in (found, expected)), strict=True))
        differing = [_differing(a, b) for a, b in pairs]
        record_property("bytes", sum(a.nbytes for a, _ in pairs))
        record_property("differing", sum(differing))
        return differing

    return count


@pytest.fixture
def same_bytes(tally):
    """same_bytes(found, expected): no differing byte."""

    def check(found, expected):
        differing = tally(found, expected)
        assert differing and not any(differing), f"differing bytes by array: {differing}"

    return check


@pytest.fixture
def on_both(gpu, tally):
    """on_both(function, *operands) -> the function's results on the GPU and on the CPU, as NumPy arrays."""

    def run(device, function, operands):
        with jax.default_device(device):
            results = function(*(jax.device_put(x, device) if isinstance(x, np.ndarray) else x for x in operands))
            assert all(r.devices() == {device} for r in jax.tree.leaves(results))
            return jax.tree.map(np.asarray, results)

    def both(function, *operands):
        results = run(gpu, function, operands), run(jax.devices("cpu")[0], function, operands)
        tally(*results)
        return results

    return both


COLUMNS = ("cases", "passed", "failed", "xfailed", "skipped", "bytes", "differing")


def pytest_terminal_summary(terminalreporter):
    """One row per file: cases, how they ended, and what the tests compared byte for byte."""
    groups = collections.defaultdict(collections.Counter)
    for outcome in ("passed", "xpassed", "failed", "error", "xfailed", "skipped"):
        for report in terminalreporter.stats.get(outcome, []):
            group = groups[Path(report.nodeid.split("::")[0]).stem.removeprefix("test_")]
            group[{"xpassed": "passed", "error": "failed"}.get(outcome, outcome)] += 1
            group["cases"] += 1
            for name, value in report.user_properties:  # a test may compare more than once
                group[name] += value
    if not groups:
        return
    devices = jax.devices("gpu")
    terminalreporter.section(f"{len(devices)} x {devices[0].device_kind}, jax {jax.__version__}")
    rows = [("", *COLUMNS[:-2], "bytes compared", "differing")]
    total = collections.Counter()
    for name, group in sorted(groups.items()):
        total.update(group)
        rows.append((name, *(f"{group[c]:,}" for c in COLUMNS)))
    rows.append(("all", *(f"{total[c]:,}" for c in COLUMNS)))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        terminalreporter.write_line(
            "  ".join(x.ljust(w) if i == 0 else x.rjust(w) for i, (x, w) in enumerate(zip(row, widths, strict=True)))
        )
