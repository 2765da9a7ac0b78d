"""The compiled draft/verify loop over a pool of slots, and the prefill that fills them.

Invariant between verifications: the cache holds the keys and values of positions below length - 1. The newest token,
at length - 1, has not been fed; the next verification feeds it together with the drafts after it.

Shape suffixes: B slots, A admitted sequences, P prompt length, T positions, G draft tokens, W = G + 1, V vocabulary.
"""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from tlt_jax.decode.propose import DRAFTERS, Context, DraftSpec
from tlt_jax.decode.sampling import SamplingParams, policy_log_probs, sampling_probs
from tlt_jax.decode.verify import verify_tokens
from tlt_jax.models.decode_view import Cache, DecodeView, cache_shardings, decode_layers, embed, empty_cache, write_rows
from tlt_jax.models.heads import ShallowExit
from tlt_jax.models.transformer import ModelShape, logits
from tlt_jax.parallel.sharding import batch_sharding, constrain

_SLOT_FIELDS = [
    "tokens_BT",
    "length_B",
    "limit_B",
    "done_B",
    "ended_B",
    "key_B2",
    "sampling",
    "policy_logp_BT",
    "sampler_logp_BT",
    "target_calls_B",
    "drafted_B",
    "accepted_B",
    "cache",
]


@partial(jax.tree_util.register_dataclass, data_fields=_SLOT_FIELDS, meta_fields=[])
@dataclass(frozen=True)
class Slots:
    """The pool's state on the device. `limit_B`: the length at which a sequence is cut; `done_B`: free or finished."""

    tokens_BT: jax.Array
    length_B: jax.Array
    limit_B: jax.Array
    done_B: jax.Array
    ended_B: jax.Array
    key_B2: jax.Array
    sampling: SamplingParams
    policy_logp_BT: jax.Array
    sampler_logp_BT: jax.Array
    target_calls_B: jax.Array
    drafted_B: jax.Array
    accepted_B: jax.Array
    cache: Cache


def empty_slots(shape: ModelShape, slots: int, length: int, dtype: jnp.dtype) -> Slots:
    """A pool of free slots for sequences of up to `length` tokens."""
    ints, floats = jnp.zeros(slots, jnp.int32), jnp.zeros((slots, length), jnp.float32)
    return Slots(
        tokens_BT=jnp.zeros((slots, length), jnp.int32),
        length_B=ints + 1,
        limit_B=ints + 1,
        done_B=jnp.ones(slots, bool),
        ended_B=jnp.zeros(slots, bool),
        key_B2=jnp.zeros((slots, 2), jnp.uint32),
        sampling=SamplingParams(jnp.ones(slots), ints, jnp.ones(slots)),
        policy_logp_BT=floats,
        sampler_logp_BT=floats,
        target_calls_B=ints,
        drafted_B=ints,
        accepted_B=ints,
        cache=empty_cache(shape, slots, length, dtype),
    )


def slot_shardings(shape: ModelShape, mesh: Mesh) -> Slots:
    """The pool with a sharding in the place of each array."""
    row = batch_sharding(mesh)
    fields: dict[str, Any] = dict.fromkeys(_SLOT_FIELDS, row)
    return Slots(**fields | {"sampling": SamplingParams(row, row, row), "cache": cache_shardings(shape, mesh)})


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["slot_A", "tokens_AP", "length_A", "limit_A", "key_A2", "sampling"],
    meta_fields=[],
)
@dataclass(frozen=True)
class Admission:
    """Prompts on their way into slots. A row whose slot lies beyond the pool is padding and goes nowhere."""

    slot_A: Any
    tokens_AP: Any
    length_A: Any
    limit_A: Any
    key_A2: Any
    sampling: SamplingParams


def prefill(view: DecodeView, slots: Slots, new: Admission) -> Slots:
    """Puts the admitted prompts into their slots and fills their cache: one pass, no head."""
    rows, prompt = new.tokens_AP.shape
    with jax.named_scope("prefill"):
        positions_AP = jnp.broadcast_to(jnp.arange(prompt), (rows, prompt))
        cache = empty_cache(view.shape, rows, prompt, view.embedding.dtype)
        _, cache = decode_layers(view.layers, cache, embed(view, new.tokens_AP), positions_AP)

    def put(old: jax.Array, fresh: Any) -> jax.Array:
        return old.at[new.slot_A].set(fresh, mode="drop")

    def put_start(old_BT: jax.Array, fresh_AP: jax.Array) -> jax.Array:
        return old_BT.at[new.slot_A, :prompt].set(fresh_AP, mode="drop")

    return Slots(
        tokens_BT=put_start(put(slots.tokens_BT, 0), new.tokens_AP),
        length_B=put(slots.length_B, new.length_A),
        limit_B=put(slots.limit_B, new.limit_A),
        done_B=put(slots.done_B, new.length_A >= new.limit_A),
        ended_B=put(slots.ended_B, False),
        key_B2=put(slots.key_B2, new.key_A2),
        sampling=jax.tree.map(put, slots.sampling, new.sampling),
        policy_logp_BT=put(slots.policy_logp_BT, 0.0),
        sampler_logp_BT=put(slots.sampler_logp_BT, 0.0),
        target_calls_B=put(slots.target_calls_B, 0),
        drafted_B=put(slots.drafted_B, 0),
        accepted_B=put(slots.accepted_B, 0),
        cache=jax.tree.map(put_start, slots.cache, cache),
    )


def decode_block(
    view: DecodeView, exit: ShallowExit, slots: Slots, eos_E: jax.Array, spec: DraftSpec, verifies: int
) -> Slots:
    """Up to `verifies` rounds of draft and verify, fewer once every slot is done. Nothing from the host inside."""
    exit = jax.tree.map(lambda a: constrain(a, *[None] * a.ndim), exit)  # put together once, not at each draft

    def going(carry):
        rounds, slots = carry
        return (rounds < verifies) & ~jnp.all(slots.done_B)

    def one(carry):
        rounds, slots = carry
        return rounds + 1, draft_and_verify(view, exit, slots, eos_E, spec)

    return jax.lax.while_loop(going, one, (0, slots))[1]


def draft_and_verify(view: DecodeView, exit: ShallowExit, slots: Slots, eos_E: jax.Array, spec: DraftSpec) -> Slots:
    """One round: propose, verify in one pass of the target, keep what stands and one token more."""
    length = spec.draft_length
    uniform_BU = _noise(slots.key_B2, slots.length_B, 2 * length + 1)
    with jax.named_scope("draft"):
        context = Context(slots.tokens_BT, slots.length_B, slots.sampling, slots.cache, uniform_BU[:, :length])
        proposal = DRAFTERS[spec.drafter](view, exit, context, spec)
    with jax.named_scope("verify"):
        positions_BW = slots.length_B[:, None] - 1 + jnp.arange(length + 1)
        depth = proposal.depth
        x_BWD, late = decode_layers(view.layers[depth:], proposal.cache[depth:], proposal.states_BWD, positions_BW)
        log_probs_BWV = policy_log_probs(logits(view, x_BWD), slots.sampling.temperature_B)
        p_BWV = sampling_probs(log_probs_BWV, slots.sampling, spec.filtered)
        accepted_B, next_B = verify_tokens(
            p_BWV,
            proposal.drafts_BG,
            proposal.q_BGV,
            proposal.drafted_B,
            uniform_BU[:, length : 2 * length],
            uniform_BU[:, -1],
        )
    slots = replace(slots, cache=(*proposal.cache[:depth], *late))
    return _emit(slots, proposal.drafts_BG, proposal.drafted_B, accepted_B, next_B, log_probs_BWV, p_BWV, eos_E)


def _noise(key_B2: jax.Array, start_B: jax.Array, count: int) -> jax.Array:
    """Uniforms [B, count], fresh for each block: keyed by the request's seed and the block's start."""

    def row(key, start):
        return jax.random.uniform(jax.random.fold_in(jax.random.wrap_key_data(key), start), (count,))

    return jax.vmap(row)(key_B2, start_B)


def _emit(
    slots: Slots,
    drafts_BG: jax.Array,
    drafted_B: jax.Array,
    accepted_B: jax.Array,
    next_B: jax.Array,
    log_probs_BWV: jax.Array,
    p_BWV: jax.Array,
    eos_E: jax.Array,
) -> Slots:
    """Appends the accepted drafts and the next token, up to the first EOS and the limit, with their log-probs."""
    total = slots.tokens_BT.shape[1]
    offset_W = jnp.arange(drafts_BG.shape[1] + 1)
    emitted_BW = jnp.pad(drafts_BG, ((0, 0), (0, 1)))
    emitted_BW = jnp.where(offset_W == accepted_B[:, None], next_B[:, None], emitted_BW)
    is_eos_BW = jnp.any(emitted_BW[..., None] == eos_E, axis=-1) & (offset_W <= accepted_B[:, None])
    eos_before_BW = jnp.cumsum(is_eos_BW, axis=1) - is_eos_BW
    room_B = slots.limit_B - slots.length_B
    kept_BW = (
        (offset_W <= accepted_B[:, None]) & (eos_before_BW == 0) & (offset_W < room_B[:, None]) & ~slots.done_B[:, None]
    )
    count_B = jnp.sum(kept_BW, axis=1)
    ended_B = slots.ended_B | jnp.any(kept_BW & is_eos_BW, axis=1)
    length_B = slots.length_B + count_B

    # What is not kept is sent beyond the end, each to a place of its own, and dropped.
    where_BW = jnp.where(kept_BW, slots.length_B[:, None] + offset_W, total + offset_W)

    def at_emitted(rows_BWV: jax.Array) -> jax.Array:
        return jnp.take_along_axis(rows_BWV, emitted_BW[..., None], axis=-1)[..., 0]

    active_B = ~slots.done_B
    return replace(
        slots,
        tokens_BT=write_rows(slots.tokens_BT, emitted_BW, where_BW),
        length_B=length_B,
        ended_B=ended_B,
        done_B=slots.done_B | ended_B | (length_B >= slots.limit_B),
        policy_logp_BT=write_rows(slots.policy_logp_BT, at_emitted(log_probs_BWV), where_BW),
        sampler_logp_BT=write_rows(
            slots.sampler_logp_BT, jnp.log(jnp.where(kept_BW, at_emitted(p_BWV), 1.0)), where_BW
        ),
        target_calls_B=slots.target_calls_B + active_B,
        drafted_B=slots.drafted_B + jnp.where(active_B, drafted_B, 0),
        accepted_B=slots.accepted_B + jnp.minimum(count_B, accepted_B),
    )
