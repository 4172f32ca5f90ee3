"""What the tests of conversion share: small pieces, folders in both forms, interruptions, damage."""

import json

import numpy as np
import pytest
from safetensors.numpy import save_file
from weight_helpers import SMALL, use_oracle_quantiser

from muse_jax import weights
from muse_jax.errors import CheckpointError
from muse_jax.tokenizer import byte_tokenizer
from muse_jax.weights import convert_checkpoint, transfer
from muse_jax.weights.safetensors_file import open_file
from muse_jax.weights.safetensors_io import INDEX_FILE

LM = "model.language_model."
PIECE, WHOLE, SHARD = 70_000, 10_000, 300_000


@pytest.fixture(scope="module", autouse=True)
def small_pieces():
    """For the modules that import it: a small model has as many pieces as a large one."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transfer, "PIECE_BYTES", PIECE)
        patch.setattr(transfer, "_WHOLE_BYTES", WHOLE)
        yield


def make_folders(path):
    """The same checkpoint as saved, in path/orbax, and as exported, in path/hf; returns its parameters."""
    with pytest.MonkeyPatch.context() as patch:
        use_oracle_quantiser(patch)
        params = weights.random_params(SMALL, 5, quantized=True)
    weights.save(path / "orbax", SMALL, params, byte_tokenizer())
    weights.export_hf(path / "hf", SMALL, params, byte_tokenizer(), max_shard_bytes=SHARD)
    return params


def to_hf(source, target, **options):
    return convert_checkpoint(source, target, max_shard_bytes=SHARD, **options)


def problems_of(*arguments, **options) -> list[str]:
    with pytest.raises(CheckpointError) as caught:
        convert_checkpoint(*arguments, **options)
    return list(caught.value.problems)


def rewrite(file, change):
    found = {key: np.array(t.read()) for key, t in open_file(file).items()}
    change(found)
    save_file(found, file)


def file_of(folder, name):
    return folder / json.loads((folder / INDEX_FILE).read_text())["weight_map"][LM + name]


class Stop(BaseException):
    """Not an Exception: no handler of ours may catch it."""


def stopping(monkeypatch, target, name, at):
    """Makes call number `at` of a function raise, before or after it has done its work."""
    real, calls = getattr(target, name), 0

    def call(*arguments, **options):
        nonlocal calls
        calls += 1
        if calls == at + 1:
            raise Stop
        return real(*arguments, **options)

    monkeypatch.setattr(target, name, call)
