"""Tokenizers: training, loading, saving, and encoding that never makes a special token out of text."""

from tlt_jax.text.tokenizer import Tokenizer, load_tokenizer, train_tokenizer

__all__ = ["Tokenizer", "load_tokenizer", "train_tokenizer"]
