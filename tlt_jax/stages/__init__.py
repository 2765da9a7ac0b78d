"""The three stages and the run that carries them."""
