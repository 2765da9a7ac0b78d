"""Import and export of Hugging Face directories of Llama's architecture: safetensors and JSON alone, never pickle."""

from tlt_jax.models.hf.load import read_drafters, read_exit, read_shape, read_weights
from tlt_jax.models.hf.names import DRAFT_MODEL
from tlt_jax.models.hf.save import export

__all__ = ["DRAFT_MODEL", "export", "read_drafters", "read_exit", "read_shape", "read_weights"]
