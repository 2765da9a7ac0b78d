"""Prompts on their way into slots: one array from the host, and the prefill that puts them there.

Shape suffixes: A admitted sequences, B slots, P prompt length, T positions, E ends, C columns.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tlt_jax.decode.drafters import OWN_LAYERS
from tlt_jax.decode.loop import Slots, run_target
from tlt_jax.decode.own_layers import Known
from tlt_jax.decode.propose import DraftCache
from tlt_jax.decode.sampling import SamplingParams
from tlt_jax.models.decode_view import Cache, DecodeView, LayerCache, embed, emptied, empty_cache


@dataclass(frozen=True)
class Request:
    """One sequence to complete: its prompt's tokens, how many may follow, its own seed, and how it is sampled.

    `ends`: the tokens that end it; None: the engine's. `stop`: texts that end it, too, once they stand in what is
    decoded of the completion.
    """

    prompt: np.ndarray
    max_new_tokens: int
    seed: int
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    ends: tuple[int, ...] | None = None
    stop: tuple[str, ...] = ()


# One row of a sequence, bit by bit: numbers of 4 bytes each, then `ends` and the prompt, each filled up.
_ROW = [
    *((name, np.int32) for name in ("slot", "length", "limit", "top_k")),
    ("key", np.uint32, (2,)),
    *((name, np.float32) for name in ("temperature", "top_p", "min_p")),
]


def packed(
    placed: Sequence[tuple[int, Request]], rows: int, size: int, max_prompt: int, eos: tuple[int, ...], most_ends: int
) -> np.ndarray:
    """(slot, request) pairs for a pool of `size` as [A, C] integers, filled up to `rows` rows with some that go beyond
    the pool: nowhere. One array, since each takes the host as long to send as a short round of decoding."""
    found = np.zeros(rows, np.dtype([*_ROW, ("ends", np.int32, (most_ends,)), ("tokens", np.int32, (max_prompt,))]))
    found["slot"], found["length"], found["limit"], found["ends"] = size, 1, 1, -1
    found["temperature"] = found["top_p"] = 1.0
    for row, (slot, request) in zip(found, placed, strict=False):
        row["slot"], row["length"] = slot, len(request.prompt)
        row["tokens"][: len(request.prompt)] = request.prompt
        row["limit"] = len(request.prompt) + request.max_new_tokens
        row["key"] = (request.seed >> 32) & 0xFFFFFFFF, request.seed & 0xFFFFFFFF
        own = eos if request.ends is None else request.ends
        row["ends"][: len(own)] = own
        for name in ("temperature", "top_k", "top_p", "min_p"):
            row[name] = getattr(request, name)
    return found.view(np.int32).reshape(rows, -1)


def prefill(view: DecodeView, slots: Slots, new_AC: jax.Array, feeds: dict[str, Any], max_prompt: int) -> Slots:
    """Puts the admitted prompts (`packed`) into their slots and fills their cache: one pass, no head. `feeds`: which
    of the drafters with layers of their own are fed, too; the others catch up when they are to draft."""
    rows = new_AC.shape[0]
    tokens_AP, ends_AE = new_AC[:, -max_prompt:], new_AC[:, 9:-max_prompt]
    slot_A, length_A, limit_A, top_k_A = new_AC[:, :4].T
    key_A2 = jax.lax.bitcast_convert_type(new_AC[:, 4:6], jnp.uint32)
    temperature_A, top_p_A, min_p_A = jax.lax.bitcast_convert_type(new_AC[:, 6:9], jnp.float32).T
    with jax.named_scope("prefill"):
        positions_AP = jnp.broadcast_to(jnp.arange(max_prompt), tokens_AP.shape)
        cache = empty_cache(view.shape, rows, max_prompt, view.embedding.dtype)
        states_APE, _, cache = run_target(view, cache, embed(view, tokens_AP), positions_AP)

    def put(old: jax.Array, fresh: Any) -> jax.Array:
        return old.at[slot_A].set(fresh, mode="drop")

    def put_start(old_BT: jax.Array, fresh_AP: jax.Array) -> jax.Array:
        return old_BT.at[slot_A, :max_prompt].set(fresh_AP, mode="drop")

    def put_layer(old: LayerCache, fresh: LayerCache) -> LayerCache:
        return LayerCache(
            old.key_BKNT.at[slot_A, ..., :max_prompt].set(fresh.key_BKNT, mode="drop"),
            old.value_BKTN.at[slot_A, :, :max_prompt].set(fresh.value_BKTN, mode="drop"),
        )

    def put_cache(old: Cache, fresh: Cache) -> Cache:
        return tuple(map(put_layer, old, fresh))

    known = Known(tokens_AP, states_APE)
    draft_caches = {}
    for name, old in slots.draft_caches.items():
        empty = emptied(old.layers, rows, max_prompt)
        feed = OWN_LAYERS[name].feed
        layers = jax.lax.cond(
            feeds[name],
            lambda feed=feed, empty=empty: feed(view, known, positions_AP, empty)[1],
            lambda empty=empty: empty,
        )
        # The newest token is fed again: what leaves the layers there is what drafting begins with.
        fed_A = jnp.where(feeds[name], length_A - 1, 0)
        draft_caches[name] = DraftCache(put_cache(old.layers, layers), put(old.fed_B, fed_A))
    return Slots(
        tokens_BT=put_start(put(slots.tokens_BT, 0), tokens_AP),
        length_B=put(slots.length_B, length_A),
        limit_B=put(slots.limit_B, limit_A),
        done_B=put(slots.done_B, length_A >= limit_A),
        ended_B=put(slots.ended_B, False),
        key_B2=put(slots.key_B2, key_A2),
        ends_BE=put(slots.ends_BE, ends_AE),
        sampling=jax.tree.map(put, slots.sampling, SamplingParams(temperature_A, top_k_A, top_p_A, min_p_A)),
        policy_logp_BT=put(slots.policy_logp_BT, 0.0),
        sampler_logp_BT=put(slots.sampler_logp_BT, 0.0),
        target_calls_B=put(slots.target_calls_B, 0),
        drafted_B=put(slots.drafted_B, 0),
        accepted_B=put(slots.accepted_B, 0),
        sources=slots.sources,
        cache=put_cache(slots.cache, cache),
        states_BTE=None if slots.states_BTE is None else put_start(slots.states_BTE, states_APE),
        draft_caches=draft_caches,
    )
