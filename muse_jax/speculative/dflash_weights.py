"""Drafts from files, in the layouts in which they are published, and random ones."""

import os
import zlib
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from muse_jax import config_hf
from muse_jax.config import MuseSparkConfig
from muse_jax.config_checks import as_path
from muse_jax.errors import CheckpointError, ConfigError
from muse_jax.language_model import LanguageModel
from muse_jax.speculative.dflash import DFlashDraft, make_draft, tree_width
from muse_jax.speculative.dflash_config import DFlashConfig
from muse_jax.speculative.dflash_model import draft_specs
from muse_jax.weights.names import BF16, ParamSpec, compare, place
from muse_jax.weights.safetensors_file import Tensor, UnreadableFile, open_file

MASK_EMBEDDING_FILE = "mask_embedding.pt"

_PREFIX = "model."
_ASSISTANT = {"encoder.fc.weight": "fc.weight", "encoder.output_norm_enc.weight": "hidden_norm.weight"}
_IGNORED_SUFFIX = "rotary_emb.inv_freq"


def load_draft(
    path: "str | os.PathLike[str]", model: LanguageModel, *, width: int | None = None,
    mask_embedding: np.ndarray | None = None,
) -> DFlashDraft:  # fmt: skip
    """Reads a published draft: a folder with config.json and safetensors files.

    Accepts the names of z-lab and SGLang (`fc`, `hidden_norm`) and those of Hugging Face's assistants (`encoder.fc`,
    `encoder.output_norm_enc`), with or without `model.`, and both forms of config.json (`DFlashConfig.from_hf`).

    Args:
        path: the folder.
        model: the target, whose embedding table and LM head the draft shares.
        width: nodes of each tree, by default the block's width.
        mask_embedding: [H], a learned row in place of the table's row of the mask token; needed where the folder has a
            mask_embedding.pt, which only PyTorch reads.

    Raises:
        CheckpointError: lists everything that is wrong with the configuration and the files: what is missing,
            unexpected or of another shape or dtype, each with file and tensor.
        ValueError: a width that is not allowed.
        TypeError: `path` is no path.
    """
    config, found = open_draft(path, model.config, width=width, mask_embedding=mask_embedding)
    # Copies, because JAX may keep host memory and files can change.
    params = {name: place(spec, np.array(found[name].read()), model.mesh) for name, spec in draft_specs(config).items()}
    mask = None
    if mask_embedding is not None:
        spec = ParamSpec("mask_embedding", mask_embedding.shape, BF16)
        mask = place(spec, mask_embedding.astype(BF16), model.mesh)
    return make_draft(
        config, params, model.params["embed_tokens.weight"], model.params["lm_head.weight"],
        width=width, mask_embedding=mask,
    )  # fmt: skip


def open_draft(
    path: "str | os.PathLike[str]", target: MuseSparkConfig, *, width: int | None = None,
    mask_embedding: np.ndarray | None = None,
) -> tuple[DFlashConfig, dict[str, Tensor]]:  # fmt: skip
    """All that `load_draft` checks, by configuration and headers: before the target itself is loaded, say.

    Args:
        path: as in `load_draft`.
        target: the model's configuration.
        width: as in `load_draft`.
        mask_embedding: as in `load_draft`.

    Returns:
        (the draft's configuration, its tensors by the names of `draft_specs`, not read yet).

    Raises:
        CheckpointError, ValueError, TypeError: as `load_draft`.
    """
    folder = as_path("path", path)
    found, problems = _read_files(folder)
    if mask_embedding is None and (folder / MASK_EMBEDDING_FILE).is_file():
        problems.append(f"{MASK_EMBEDDING_FILE}: cannot be read without PyTorch; pass its values as mask_embedding")
    elif mask_embedding is not None and mask_embedding.shape != (target.hidden_size,):
        problems.append(f"mask_embedding: given {mask_embedding.shape}, expected ({target.hidden_size},)")
    config = None
    try:
        config = DFlashConfig.from_hf(config_hf.read_json(folder / config_hf.CONFIG_FILE), target)
    except ConfigError as error:
        problems += [f"{config_hf.CONFIG_FILE}: {problem}" for problem in error.problems]
    if config is not None and found is not None:
        problems += compare(draft_specs(config), found, lambda name: _where(name, found))
    if problems or config is None or found is None:
        raise CheckpointError(f"cannot load the draft in {folder}", problems)
    tree_width(config, width)
    return config, found


def _where(name: str, found: dict[str, Tensor]) -> str:
    tensor = found.get(name)
    return name if tensor is None else f"{tensor.path.name}: {tensor.key}"


def _read_files(folder: Path) -> tuple[dict[str, Tensor] | None, list[str]]:
    """Tensors by our names, or None if what is there cannot be compared; and problems."""
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        return None, ["no *.safetensors files; give the folder that holds the draft's config.json"]
    found: dict[str, Tensor] = {}
    problems: list[str] = []
    complete = True
    for file in files:
        try:
            tensors = open_file(file)
        except UnreadableFile as error:
            problems.append(f"{file.name}: {error}")
            complete = False
            continue
        for key, tensor in tensors.items():
            if key.endswith(_IGNORED_SUFFIX):
                continue
            name = key.removeprefix(_PREFIX)
            first = found.setdefault(_ASSISTANT.get(name, name), tensor)
            if first is not tensor:
                problems.append(f"{file.name}: {key}: duplicated, also in {first.path.name} as {first.key}")
    return (found if complete else None), problems


def random_draft(
    config: DFlashConfig, key: jax.Array, embedding: jax.Array, head: jax.Array, *, width: int | None = None
) -> DFlashDraft:
    """A draft of random weights, for tests and benchmarks, in which every part has an effect.

    Args:
        config: the draft's.
        key: the weights depend on it and on their names.
        embedding: bf16 [V, H], the target's; says where the weights are put.
        head: bf16 [V, H], the target's.
        width: nodes of each tree, by default the block's width.
    """
    params = {}
    for name, spec in draft_specs(config).items():
        noise = jax.random.normal(jax.random.fold_in(key, zlib.crc32(name.encode()) >> 1), spec.shape, jnp.bfloat16)
        if name.endswith("norm.weight"):
            array = 1 + noise / 5
        elif name.endswith("base_kernel"):  # near the identity: tap 0 is 1, tap 1 is 0
            array = noise / 5 + jnp.array([1, 0], jnp.bfloat16)[None, :, None]
        elif name.endswith("kernel_projection.weight"):
            array = noise * (0.2 * spec.shape[1] ** -0.5)
        elif name.endswith("codebook"):
            array = noise * spec.shape[1] ** -0.25  # products of three sum up to about 1
        else:
            array = noise * spec.shape[1] ** -0.5
        params[name] = jax.device_put(array.astype(jnp.bfloat16), embedding.sharding)
    return make_draft(config, params, embedding, head, width=width)
