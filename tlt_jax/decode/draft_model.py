"""The draft model: a separate, small model of the same vocabulary (Leviathan et al. 2023).

Shape suffixes: B slots, W tokens fed at once, D the draft model's width.
"""

import jax

from tlt_jax.decode.own_layers import Known, OwnLayers
from tlt_jax.models.decode_view import Cache, DecodeView, decode_layers, embed
from tlt_jax.models.transformer import logits


def _feed(view: DecodeView, known: Known, place_BW: jax.Array, cache: Cache) -> tuple[jax.Array, Cache]:
    """Known tokens: as drafts."""
    return _run(view, known.tokens_at(place_BW), place_BW, cache)


def _advance(
    view: DecodeView, y_B1D: jax.Array, token_B1: jax.Array, place_B1: jax.Array, cache: Cache
) -> tuple[jax.Array, Cache]:
    """A draft; what left the layers before it is in the cache."""
    return _run(view, token_B1, place_B1, cache)


def _run(view: DecodeView, token_BW: jax.Array, place_BW: jax.Array, cache: Cache) -> tuple[jax.Array, Cache]:
    model = _model(view)
    return decode_layers(model, model.layers, cache, embed(model, token_BW), place_BW)


def _logits(view: DecodeView, y_B1D: jax.Array) -> jax.Array:
    return logits(_model(view), y_B1D)


def _model(view: DecodeView) -> DecodeView:
    assert view.draft_model is not None
    return view.draft_model


DRAFT_MODEL = OwnLayers("draft_model", _feed, _advance, _logits, keeps=True)
