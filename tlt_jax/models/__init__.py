"""The transformer, its heads and drafters, the decoding cache, and Hugging Face import and export."""
