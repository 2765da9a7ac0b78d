"""Typed configuration: schema, loading, overrides, validation. Imports nothing of the project and no JAX."""

from tlt_jax.config.load import ConfigError, dump_config, load_config, redacted
from tlt_jax.config.schema import Config

__all__ = ["Config", "ConfigError", "dump_config", "load_config", "redacted"]
