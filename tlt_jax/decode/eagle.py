"""The eagle drafter: one layer of its own, over the target's states and its own (EAGLE, Li et al. 2024).

A draft's entry in the layer's cache is made from the drafter's own state before it. Once the draft stands the target's
state there is known, and the entry is made again from that.

Shape suffixes: B slots, W tokens fed at once, D width, E = 2 D: what leaves the target's exit layer and its last one.
"""

import jax
import jax.numpy as jnp

from tlt_jax.decode.own_layers import Known, OwnLayers
from tlt_jax.models.decode_view import Cache, DecodeView, decode_layers, embed
from tlt_jax.models.eagle import Eagle, eagle_inputs, eagle_logits, known_inputs


def _feed(view: DecodeView, known: Known, place_BW: jax.Array, cache: Cache) -> tuple[jax.Array, Cache]:
    """Known tokens, with the target's states before them: none before the first."""
    assert known.states_BTE is not None
    eagle = _eagle(view)
    before_BWE = jnp.take_along_axis(known.states_BTE, jnp.maximum(place_BW - 1, 0)[..., None], axis=1, mode="clip")
    before_BWE = jnp.where(place_BW[..., None] > 0, before_BWE, 0.0)
    x_BWD = known_inputs(eagle, before_BWE, embed(view, known.tokens_at(place_BW)))
    return decode_layers(view, (eagle.layer,), cache, x_BWD, place_BW)


def _advance(
    view: DecodeView, y_B1D: jax.Array, token_B1: jax.Array, place_B1: jax.Array, cache: Cache
) -> tuple[jax.Array, Cache]:
    """A draft, with what left the layer before it."""
    eagle = _eagle(view)
    return decode_layers(view, (eagle.layer,), cache, eagle_inputs(eagle, y_B1D, embed(view, token_B1)), place_B1)


def _logits(view: DecodeView, y_B1D: jax.Array) -> jax.Array:
    return eagle_logits(view, _eagle(view), y_B1D)


def _eagle(view: DecodeView) -> Eagle:
    assert view.eagle is not None
    return view.eagle


EAGLE = OwnLayers("eagle", _feed, _advance, _logits, keeps=False)
