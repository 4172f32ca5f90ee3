"""At the released layers' size: memory, time, 20 kills, and a model larger than what the host has for it.

`make test-slow`. Needs about 45 GB of disk below pytest's temporary folder; everything is made on the spot.
"""

import contextlib
import hashlib
import os
import pathlib
import random
import re
import shutil
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from muse_jax import weights
from muse_jax.config import MuseSparkConfig
from muse_jax.mesh import make_mesh
from muse_jax.weights import parameter_specs
from muse_jax.weights.checkpoints import open_source
from muse_jax.weights.names import BF16, E4M3, FP32
from muse_jax.weights.orbax_io import OrbaxSource, OrbaxTarget
from muse_jax.weights.quantize import quantize_expert
from muse_jax.weights.safetensors_export import MAX_SHARD_BYTES, SafetensorsTarget
from muse_jax.weights.transfer import pieces, transfer

pytestmark = pytest.mark.slow

ROOT = pathlib.Path(__file__).parent.parent
GB = 1e9
LAYER = 7_826_670_592  # bytes of a released NVFP4 layer, 18.6 MB of scales of scales and norms less


def released(layers: int, **changes) -> MuseSparkConfig:
    config = MuseSparkConfig.released()
    return config.replace(
        num_hidden_layers=layers, layer_types=config.layer_types[-layers:],
        layer_rope_theta=config.layer_rope_theta[-layers:], expert_formats=("nvfp4",) * layers, **changes,
    )  # fmt: skip


@pytest.fixture
def folder(tmp_path):
    """Cleared at once: pytest would keep it for three runs."""
    yield tmp_path
    shutil.rmtree(tmp_path)


class Noise:
    """Random bits that are valid numbers; every piece is another part of one block."""

    problems: list[str] = []  # noqa: RUF012

    def __init__(self, config, specs=None):
        self.config, self.specs = config, specs or parameter_specs(config)
        self._block = np.random.default_rng(0).integers(0, 1 << 32, (1 << 28) // 4 + 1, np.uint32)
        self._turn = random.Random(0)

    def rows(self, name, start, stop):
        spec = self.specs[name]
        count = spec.nbytes // spec.shape[0] * (stop - start)
        at = self._turn.randrange(len(self._block) - -(-count // 4))
        words = self._block[at : at + -(-count // 4)].copy()
        if spec.dtype == BF16:
            words &= np.uint32(0xBFFFBFFF)
        elif spec.dtype == FP32:
            words = words & np.uint32(0x3FFFFFFF) | np.uint32(0x00800000)
        elif spec.dtype == E4M3:
            words &= np.uint32(0x7B7B7B7B)
        return words.view(np.uint8)[:count].view(spec.dtype).reshape(stop - start, *spec.shape[1:])


def make(target, source):
    transfer(source, target)
    target.finish()


def digests(folder) -> dict[str, str]:
    found = {}
    for file in sorted(f for f in folder.rglob("*") if f.is_file()):
        with file.open("rb") as stream:
            found[str(file.relative_to(folder))] = hashlib.file_digest(stream, "sha256").hexdigest()
    return found


def run(*arguments, kill_at=None, journal=None) -> tuple[int, float, int]:
    """(exit code, seconds, peak resident bytes) of muse-jax, killed soon after the journal has so many lines."""
    begin, peak = time.monotonic(), 0
    command = [sys.executable, "-m", "muse_jax.cli", *map(str, arguments)]
    process = subprocess.Popen(command, cwd=ROOT, env=os.environ | {"JAX_PLATFORMS": "cpu"})
    status = pathlib.Path(f"/proc/{process.pid}/status")
    doom = None
    while process.poll() is None:
        with contextlib.suppress(OSError):
            if high := re.search(r"VmHWM:\s+(\d+) kB", status.read_text()):  # not ru_maxrss: that includes the parent's
                peak = max(peak, int(high[1]) * 1024)
        if kill_at is not None and doom is None and lines(journal) >= kill_at:
            doom = time.monotonic() + random.random() * 0.3  # anywhere in what follows
        if doom is not None and time.monotonic() >= doom:
            process.send_signal(signal.SIGKILL)
        time.sleep(0.005)
    return process.returncode, time.monotonic() - begin, peak


HOST_ONLY = """
import sys, time, jax
from muse_jax import weights
from muse_jax.mesh import make_mesh
jax.config.update("jax_num_cpu_devices", 8)
mesh = make_mesh(int(sys.argv[2]))
# A CPU's device memory is the host's: devices that keep nothing show what loading itself needs there.
jax.device_put = lambda rows, device: rows.nbytes
jax.block_until_ready = lambda handles: handles
jax.make_array_from_single_device_arrays = lambda shape, sharding, handles: sum(handles)
begin = time.monotonic()
config, sizes = weights.load(sys.argv[1], mesh)
seconds = time.monotonic() - begin
assert all(sizes[n] == s.nbytes * (1 if s.placement == "expert" else mesh.size)
           for n, s in weights.parameter_specs(config).items())
peak = next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith("VmHWM"))
print(seconds, peak)
"""


def loaded(folder, devices) -> tuple[float, int]:
    """(seconds, peak resident bytes) of loading onto so many devices that have memory of their own."""
    command = [sys.executable, "-c", HOST_ONLY, folder, str(devices)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    seconds, peak = done.stdout.split()
    return float(seconds), int(peak)


def lines(journal) -> int:
    return journal.read_bytes().count(b"\n") if journal.exists() else 0


def killed(source, target, times, seed, capfd, *options):
    """Converts with so many kills at random moments, prints a table, and returns the peak memory of all runs."""
    journal = target.with_name(f".{target.name}.partial") / "journal.txt"
    total, chance = len(list(pieces(parameter_specs(released(2))))), random.Random(seed)
    rows, peak = [], 0
    for number in range(times + 1):
        before = lines(journal)
        step = chance.randint(1, max(1, 2 * (total - before) // (times + 1 - number) - 2))
        code, seconds, memory = run("convert", source, target, *options, journal=journal,
                                    kill_at=None if number == times else before + step)  # fmt: skip
        after = total if number == times else lines(journal)
        rows.append((number + 1, before, after, seconds, memory / GB))
        assert (code, target.exists()) == ((0, True) if number == times else (-signal.SIGKILL, False))
        peak = max(peak, memory)
    with capfd.disabled():
        print(f"\n{source.name} -> {target.name}, {total} pieces\nrun  from    to  seconds  peak GB")
        for row in rows:
            print("{:3d} {:5d} {:5d}  {:7.1f}  {:7.2f}".format(*row))
    return peak


def test_released_layers(folder, capfd):
    """22 GB: two layers, the whole vocabulary. There and back, killed 20 times each way, in a quarter of a layer."""
    config = released(2)
    specs = parameter_specs(config)
    size = sum(spec.nbytes for spec in specs.values())
    assert size > 20 * GB
    source, ours, back = folder / "source", folder / "ours", folder / "back"
    source.mkdir()
    make(SafetensorsTarget(source, config, specs, MAX_SHARD_BYTES), Noise(config))
    expected = digests(source)
    code, seconds, memory = run("convert", source, ours)
    assert code == 0
    with capfd.disabled():
        rate = f"{seconds:.0f} s, {size / seconds / 1e6:.0f} MB/s"
        print(f"\n{size / GB:.1f} GB to our form: {rate}, peak {memory / GB:.2f} GB")
    assert memory < LAYER / 4
    undisturbed = digests(ours)
    shutil.rmtree(ours)
    assert killed(source, ours, 20, 1, capfd) < LAYER / 4
    assert digests(ours) == undisturbed
    shutil.rmtree(source)
    assert killed(ours, back, 20, 2, capfd) < LAYER / 4
    assert digests(back) == expected
    for made in (ours, back):
        for devices in (8, 1):
            seconds, memory = loaded(made, devices)
            with capfd.disabled():
                rate = f"{seconds:.0f} s, {size / seconds / 1e6:.0f} MB/s, peak on the host {memory / GB:.2f} GB"
                print(f"{made.name} onto {devices} devices: {rate}")
            assert memory < 5.5 * GB < size / 4
    assert sorted(p.name for p in folder.iterdir()) == ["back", "ours"]


def test_a_released_layer_on_the_mesh(folder):
    """8 GB really loaded, onto two CPU devices: every byte of every device's rows is the source's."""
    config = released(1, vocab_size=8192, bos_token_id=0, eos_token_ids=(1,), pad_token_id=None)
    source = Noise(config)
    make(OrbaxTarget(folder, config, source.specs), source)
    found, params = weights.load(folder, make_mesh(2))
    assert found == config
    stored = OrbaxSource(weights.read_contents(folder))
    compared = 0
    for piece in pieces(source.specs):
        rows = stored.rows(*piece)
        for shard in params[piece.name].addressable_shards:
            first, last, _ = shard.index[0].indices(source.specs[piece.name].shape[0])
            start, stop = max(first, piece.start), min(last, piece.stop)
            if start < stop:
                found_rows = np.asarray(shard.data)[start - first : stop - first].view(np.uint8)
                assert np.array_equal(found_rows, rows[start - piece.start : stop - piece.start].view(np.uint8)), piece
                compared += found_rows.nbytes
    assert compared == sum(spec.nbytes * (2 - (spec.placement == "expert")) for spec in source.specs.values())


def test_a_bf16_layer_quantised(folder, capfd):
    """26 GB of masters to NVFP4 in a fraction of their memory; three experts made again."""
    config = released(1, vocab_size=8192, bos_token_id=0, eos_token_ids=(1,), pad_token_id=None)
    specs = parameter_specs(config, ("bf16",))
    size = sum(spec.nbytes for spec in specs.values())
    source, ours = folder / "source", folder / "ours"
    source.mkdir()
    make(SafetensorsTarget(source, config, specs, MAX_SHARD_BYTES), Noise(config, specs))
    code, seconds, memory = run("convert", source, ours, "--quantize")
    assert code == 0
    with capfd.disabled():
        rate = f"{seconds:.0f} s, {size / seconds / 1e6:.0f} MB/s"
        print(f"\n{size / GB:.1f} GB quantised: {rate}, peak {memory / GB:.2f} GB")
    assert memory < 2 * GB < size / 10
    masters, made = (open_source(path, None)[1] for path in (source, ours))
    assert made.config == config and made.specs == parameter_specs(config)
    for expert in (0, 100, 255):
        for leaf in ("gate_up_proj", "down_proj"):
            name = f"layers.0.mlp.experts.{leaf}"
            expected = quantize_expert(masters.rows(name, expert, expert + 1)[0], leaf == "gate_up_proj")
            for suffix, array in expected.items():
                assert made.rows(name + suffix, expert, expert + 1)[0].tobytes() == array.tobytes()
