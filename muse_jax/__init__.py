"""muse-jax: Muse Spark Open decoded in JAX at the speed of memory, with the bits of an expert-parallel reference."""

from muse_jax.config import MuseSparkConfig
from muse_jax.errors import CheckpointError, ConfigError
from muse_jax.generate import GenerationStream, generate, stream
from muse_jax.generation import Acceptance, Chunk, Generation
from muse_jax.guarantee import guarantee
from muse_jax.inspection import Inspection, inspect_checkpoint
from muse_jax.language_model import LanguageModel, load
from muse_jax.mesh import make_mesh
from muse_jax.parity import ParityReport, parity
from muse_jax.sampling import Sampling
from muse_jax.speculative.dflash_weights import load_draft, random_draft
from muse_jax.weights import Conversion, convert_checkpoint

__version__ = "0.1.0"

__all__ = [
    "Acceptance",
    "CheckpointError",
    "Chunk",
    "ConfigError",
    "Conversion",
    "Generation",
    "GenerationStream",
    "Inspection",
    "LanguageModel",
    "MuseSparkConfig",
    "ParityReport",
    "Sampling",
    "convert_checkpoint",
    "generate",
    "guarantee",
    "inspect_checkpoint",
    "load",
    "load_draft",
    "make_mesh",
    "parity",
    "random_draft",
    "stream",
]
