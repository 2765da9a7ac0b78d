"""EAGLE's weights: one decoder layer over the target's states and the tokens after them (Li et al. 2024).

The state that predicted a token, and the token's embedding, go in together; what comes out takes the place of the state
that the target would have had there, so that drafting goes on from its own output. Of tokens that the target has seen,
the state after its first layers goes in too (EAGLE-3, Li et al. 2025, takes three depths). Embedding and head are the
target's.

Shape suffixes: B rows, S sequence, D width, E = 2 D: what leaves the exit layer and the last one, side by side.
"""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from tlt_jax.models.declare import Declare
from tlt_jax.models.transformer import Block, ModelShape, project, rms_norm
from tlt_jax.parallel.sharding import constrain


class Eagle(nnx.Module):
    """A layer of the target's shape, what brings state and token together before it, and a norm after it."""

    def __init__(self, s: ModelShape, declare: Declare):
        self.shape = s
        ones = (s.width,), ("embed",), "ones"
        part = (s.width, s.width), ("embed", "rank"), (2 * s.width) ** -0.5
        self.state_norm, self.token_norm = declare("state_norm", *ones), declare("token_norm", *ones)
        self.from_state, self.from_token = declare("from_state", *part), declare("from_token", *part)
        self.early_norm, self.from_early = declare("early_norm", *ones), declare("from_early", *part)
        # Hugging Face's Llama has no such layer.
        ours = replace(declare, make=lambda spec: declare.make(replace(spec, hf=None)))
        self.layer = Block(s, ours.into("layer"))
        self.norm = declare("norm", *ones)


def both_states(x_exit_BSD: jax.Array, x_BSD: jax.Array) -> jax.Array:
    """What the drafter is told of tokens that the target has seen, [B, S, E]."""
    return jnp.concatenate([x_exit_BSD, x_BSD], axis=-1)


def known_inputs(eagle: Eagle, before_BSE: jax.Array, embedded_BSD: jax.Array) -> jax.Array:
    """What goes into the layer [B, S, D] of each token that the target has seen: its embedding, and the states that
    predicted it (zeros before the first)."""
    early_BSD, last_BSD = jnp.split(before_BSE, 2, axis=-1)
    return eagle_inputs(eagle, last_BSD, embedded_BSD) + _part(eagle, early_BSD, eagle.early_norm, eagle.from_early)


def eagle_inputs(eagle: Eagle, before_BSD: jax.Array, embedded_BSD: jax.Array) -> jax.Array:
    """What goes into the layer [B, S, D] of each draft: its embedding, and what left the layer before it."""
    state = _part(eagle, before_BSD, eagle.state_norm, eagle.from_state)
    return state + _part(eagle, embedded_BSD, eagle.token_norm, eagle.from_token)


def _part(eagle: Eagle, x_BSD: jax.Array, norm: jax.Array, weight: jax.Array) -> jax.Array:
    """One of the parts whose sum goes into the layer."""
    with jax.named_scope("eagle"):
        product = rms_norm(x_BSD, norm, eagle.shape.norm_eps) @ constrain(weight, None, None)
        return constrain(product, "batch", None, None)


def eagle_logits(model: Any, eagle: Eagle, y_BSD: jax.Array) -> jax.Array:
    """The drafter's logits [B, S, V] in float32 from what leaves its layer; `model` (or its decode view) lends its head
    alone."""
    return project(model, rms_norm(y_BSD, eagle.norm, eagle.shape.norm_eps))
