"""muse-jax: bit-exact decoding of Muse Spark Open with JAX."""

__version__ = "0.1.0"
