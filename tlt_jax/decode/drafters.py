"""The drafters by name."""

from collections.abc import Callable

from tlt_jax.decode.eagle import propose_eagle
from tlt_jax.decode.ngram import propose_ngram
from tlt_jax.decode.propose import Choice, Context, Proposal, Rules, propose_nothing
from tlt_jax.decode.shallow import propose_shallow
from tlt_jax.models.decode_view import DecodeView

DRAFTERS: dict[str, Callable[[DecodeView, Context, Choice, Rules], Proposal]] = {
    "shallow": propose_shallow,
    "eagle": propose_eagle,
    "ngram": propose_ngram,
    "off": propose_nothing,
}
