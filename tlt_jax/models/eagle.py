"""EAGLE's weights: one decoder layer over the target's last states and the tokens after them (Li et al. 2024).

The state that predicted a token, and the token's embedding, go in together; what comes out takes the place of the state
that the target would have had there, so that drafting goes on from its own output. Embedding and head are the target's.
"""

from dataclasses import replace
from typing import Any

import jax
from flax import nnx

from tlt_jax.models.declare import Declare
from tlt_jax.models.transformer import Block, ModelShape, project, rms_norm
from tlt_jax.parallel.sharding import constrain


class Eagle(nnx.Module):
    """A layer of the target's shape, what brings state and token together before it, and a norm after it."""

    def __init__(self, s: ModelShape, declare: Declare):
        self.shape = s
        ones = (s.width,), ("embed",), "ones"
        half = (s.width, s.width), ("embed", "rank"), (2 * s.width) ** -0.5
        self.state_norm, self.token_norm = declare("state_norm", *ones), declare("token_norm", *ones)
        self.from_state, self.from_token = declare("from_state", *half), declare("from_token", *half)
        # Hugging Face's Llama has no such layer.
        ours = replace(declare, make=lambda spec: declare.make(replace(spec, hf=None)))
        self.layer = Block(s, ours.into("layer"))
        self.norm = declare("norm", *ones)


def eagle_inputs(eagle: Eagle, before_BSD: jax.Array, embedded_BSD: jax.Array) -> jax.Array:
    """What goes into the layer [B, S, D]: of each token its embedding, and the state that predicted it (zeros before
    the first)."""
    with jax.named_scope("eagle"):
        eps, dtype = eagle.shape.norm_eps, embedded_BSD.dtype
        from_state, from_token = (constrain(a.astype(dtype), None, None) for a in (eagle.from_state, eagle.from_token))
        return constrain(
            rms_norm(before_BSD, eagle.state_norm, eps) @ from_state
            + rms_norm(embedded_BSD, eagle.token_norm, eps) @ from_token,
            "batch",
            None,
            None,
        )


def eagle_logits(model: Any, eagle: Eagle, y_BSD: jax.Array) -> jax.Array:
    """The drafter's logits [B, S, V] in float32 from what leaves its layer; `model` (or its decode view) lends its head
    alone."""
    return project(model, rms_norm(y_BSD, eagle.norm, eagle.shape.norm_eps))
