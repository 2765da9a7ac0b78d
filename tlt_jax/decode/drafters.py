"""The drafters by name."""

from collections.abc import Callable
from functools import partial

from tlt_jax.decode import own_layers
from tlt_jax.decode.draft_model import DRAFT_MODEL
from tlt_jax.decode.eagle import EAGLE
from tlt_jax.decode.ngram import propose_ngram
from tlt_jax.decode.propose import Choice, Context, Proposal, Rules, propose_nothing
from tlt_jax.decode.shallow import propose_shallow
from tlt_jax.models.decode_view import DecodeView

OWN_LAYERS = {own.name: own for own in (EAGLE, DRAFT_MODEL)}
DRAFTERS: dict[str, Callable[[DecodeView, Context, Choice, Rules], Proposal]] = {
    "shallow": propose_shallow,
    **{name: partial(own_layers.propose, own=own) for name, own in OWN_LAYERS.items()},
    "ngram": propose_ngram,
    "off": propose_nothing,
}
