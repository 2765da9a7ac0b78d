"""Speculative decoding: distributions, proposals, verification, the compiled loop, the engine, and `Rollout`."""
