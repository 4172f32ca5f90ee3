"""The readable model: Flax modules for one device's share, and the expert-parallel reference that runs them."""

from muse_jax.model.muse_spark import MuseSpark
from muse_jax.model.reference import Reference, build, params_of

__all__ = ["MuseSpark", "Reference", "build", "params_of"]
