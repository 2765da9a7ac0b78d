"""Checkpoints: an Orbax store that verifies what it restores."""
