"""tlt_jax: language models in three stages, with lossless speculative rollouts, on JAX."""

__version__ = "0.1.0"
