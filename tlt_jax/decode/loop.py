"""The compiled draft/verify loop over a pool of slots.

Invariant between verifications: the cache holds the keys and values of positions below length - 1. The newest token,
at length - 1, has not been fed; the next verification feeds it together with the drafts after it.

Shape suffixes: B slots, T positions, G draft tokens, W = G + 1, V vocabulary, E ends.
"""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from tlt_jax.decode.drafters import DRAFTERS, OWN_LAYERS
from tlt_jax.decode.ngram import copies_of
from tlt_jax.decode.own_layers import caught_up, standing
from tlt_jax.decode.propose import OFF, Choice, Context, Copies, DraftCache, Proposal, Rules, Sources
from tlt_jax.decode.sampling import Policy, SamplingParams, likeliest, policy_of, sampling_probs
from tlt_jax.decode.verify import VERIFIERS, verify_own
from tlt_jax.models.decode_view import (
    Cache,
    DecodeView,
    cache_shardings,
    decode_layers,
    empty_cache,
    write_rows,
)
from tlt_jax.models.eagle import both_states
from tlt_jax.models.transformer import ModelShape, logits
from tlt_jax.parallel.sharding import batch_sharding

_SLOT_FIELDS = [
    "tokens_BT",
    "length_B",
    "limit_B",
    "done_B",
    "ended_B",
    "key_B2",
    "ends_BE",
    "sampling",
    "policy_logp_BT",
    "sampler_logp_BT",
    "target_calls_B",
    "drafted_B",
    "accepted_B",
    "sources",
    "cache",
    "states_BTE",
    "draft_caches",
]


@partial(jax.tree_util.register_dataclass, data_fields=_SLOT_FIELDS, meta_fields=[])
@dataclass(frozen=True)
class Slots:
    """The pool's state on the device. `limit_B`: the length at which a sequence is cut; `done_B`: free or finished;
    `ends_BE`: the tokens that end it, -1 for none; `states_BTE`: what left the target's exit layer and its last one at
    each position that is in the cache (None where eagle never drafts); `draft_caches`: of those that may draft with
    layers of their own."""

    tokens_BT: jax.Array
    length_B: jax.Array
    limit_B: jax.Array
    done_B: jax.Array
    ended_B: jax.Array
    key_B2: jax.Array
    ends_BE: jax.Array
    sampling: SamplingParams
    policy_logp_BT: jax.Array
    sampler_logp_BT: jax.Array
    target_calls_B: jax.Array
    drafted_B: jax.Array
    accepted_B: jax.Array
    sources: Sources
    cache: Cache
    states_BTE: jax.Array | None
    draft_caches: dict[str, DraftCache]


Own = dict[str, ModelShape]  # of each drafter with layers of its own: their shape
NO_OWN: Own = {}


def empty_slots(
    shape: ModelShape, slots: int, length: int, ends: int, rules: Rules, dtype: jnp.dtype, own: Own = NO_OWN
) -> Slots:
    """A pool of free slots for sequences of up to `length` tokens, each with up to `ends` tokens that end it."""
    ints, floats = jnp.zeros(slots, jnp.int32), jnp.zeros((slots, length), jnp.float32)
    return Slots(
        tokens_BT=jnp.zeros((slots, length), jnp.int32),
        length_B=ints + 1,
        limit_B=ints + 1,
        done_B=jnp.ones(slots, bool),
        ended_B=jnp.zeros(slots, bool),
        key_B2=jnp.zeros((slots, 2), jnp.uint32),
        ends_BE=jnp.full((slots, ends), -1, jnp.int32),
        sampling=SamplingParams(jnp.ones(slots), ints, jnp.ones(slots), jnp.zeros(slots)),
        policy_logp_BT=floats,
        sampler_logp_BT=floats,
        target_calls_B=ints,
        drafted_B=ints,
        accepted_B=ints,
        sources=Sources(
            jnp.full((slots, rules.ngram_siblings), slots, jnp.int32),
            jnp.zeros((slots, rules.ngram_history, length), jnp.int32),
            jnp.zeros((slots, rules.ngram_history), jnp.int32),
        ),
        cache=empty_cache(shape, slots, length, dtype),
        states_BTE=jnp.zeros((slots, length, 2 * shape.width), dtype) if "eagle" in own else None,
        draft_caches={name: DraftCache(empty_cache(s, slots, length, dtype), ints) for name, s in own.items()},
    )


def slot_shardings(shape: ModelShape, mesh: Mesh, own: Own = NO_OWN) -> Slots:
    """The pool with a sharding in the place of each array."""
    row = batch_sharding(mesh)
    fields: dict[str, Any] = dict.fromkeys(_SLOT_FIELDS, row)
    return Slots(
        **fields
        | {
            "sampling": SamplingParams(row, row, row, row),
            "sources": Sources(row, row, row),
            "cache": cache_shardings(shape, mesh),
            "states_BTE": row if "eagle" in own else None,
            "draft_caches": {name: DraftCache(cache_shardings(s, mesh), row) for name, s in own.items()},  # type: ignore[arg-type]
        }
    )


def resized(slots: Slots, where_C: jax.Array) -> Slots:
    """The pool of as many slots as `where_C` has entries: each says which slot of the old pool comes there; one beyond
    it, that none does, and the slot is free."""
    moved = jax.tree.map(lambda a: a.at[where_C].get(mode="clip"), slots)
    return replace(moved, done_B=moved.done_B | (where_C >= slots.done_B.shape[0]))


class BlockStats(NamedTuple):
    """What one block did. rounds: verifications of the pool; calls: of sequences that were not done; emitted: tokens;
    offered_G, kept_G: how often there was a draft at each position of a sequence's round, and how often it was kept.
    Within a block they are each slot's own, so that devices have nothing to tell each other."""

    rounds: jax.Array
    calls: jax.Array
    emitted: jax.Array
    offered_G: jax.Array
    kept_G: jax.Array


class Patience(NamedTuple):
    """A block ends from `least` rounds on with no more than `until` sequences unfinished, and after `most` anyhow."""

    least: Any
    most: Any
    until: Any


def decode_block(
    view: DecodeView, slots: Slots, patience: Patience, choice: Choice, rules: Rules
) -> tuple[Slots, BlockStats]:
    """Rounds of draft and verify until the host's patience ends, or all are done. Nothing from the host inside."""
    if choice.drafter in OWN_LAYERS:
        cache = caught_up(view, context_of(slots), slots.done_B, choice.draft_length, OWN_LAYERS[choice.drafter])
        slots = replace(slots, draft_caches={**slots.draft_caches, choice.drafter: cache})
    zeros_B = jnp.zeros_like(slots.length_B)
    zeros_BG = jnp.zeros((*zeros_B.shape, choice.draft_length), jnp.int32)

    def going(carry):
        slots, stats, _ = carry
        active = jnp.sum(~slots.done_B)
        wanted = (stats.rounds < patience.least) | (active > patience.until)
        return (active > 0) & wanted & (stats.rounds < patience.most)

    def copies(slots):
        return copies_of(context_of(slots), choice, rules) if choice.drafter == "ngram" else None

    def one(carry, choice=choice):
        slots, stats, found = carry
        slots, done = draft_and_verify(view, slots, choice, rules, found)
        if choice is OFF:
            done = done._replace(offered_G=zeros_BG, kept_G=zeros_BG)
        return slots, jax.tree.map(jnp.add, stats, done), copies(slots)

    def some_narrow_some_wide(carry):
        carry = jax.lax.while_loop(lambda carry: going(carry) & ~has_drafts(carry), partial(one, choice=OFF), carry)
        return jax.lax.while_loop(lambda carry: going(carry) & has_drafts(carry), one, carry)

    def has_drafts(carry):
        slots, _, found = carry
        return some_drafts(slots, found)

    nothing = BlockStats(jnp.int32(0), zeros_B, zeros_B, zeros_BG, zeros_BG)
    # A verification without a single draft is a plain step. Two loops, since a branch would copy the caches.
    body = some_narrow_some_wide if choice.drafter == "ngram" else one
    slots, stats, _ = jax.lax.while_loop(going, body, (slots, nothing, copies(slots)))
    return slots, BlockStats(stats.rounds, *(jnp.sum(each, axis=0) for each in stats[1:]))


def some_drafts(slots: Slots, copies: Copies) -> jax.Array:
    """Whether there is a draft for a sequence that is not done."""
    return jnp.any((copies.count_B > 0) & ~slots.done_B)


def context_of(slots: Slots, noise_GB: jax.Array | None = None, copies: Copies | None = None) -> Context:
    """What a drafter sees of the slots."""
    names = ("tokens_BT", "length_B", "sampling", "cache", "sources", "states_BTE", "draft_caches")
    if noise_GB is None:
        noise_GB = jnp.zeros((0, *slots.length_B.shape))
    return Context(noise_GB=noise_GB, copies=copies, **{name: getattr(slots, name) for name in names})


def run_target(
    view: DecodeView, cache: Cache, x_BWD: jax.Array, positions_BW: jax.Array, depth: int = 0
) -> tuple[jax.Array, jax.Array, Cache]:
    """(what left the exit layer and the last one, side by side; the latter; the cache) of the fed tokens, whose states
    have gone through `depth` layers: none, or up to the exit."""
    exit = view.shape.exit_layer
    assert depth in (0, exit)
    x_exit_BWD, early = decode_layers(view, view.layers[depth:exit], cache[depth:exit], x_BWD, positions_BW)
    x_BWD, late = decode_layers(view, view.layers[exit:], cache[exit:], x_exit_BWD, positions_BW)
    return both_states(x_exit_BWD, x_BWD), x_BWD, (*cache[:depth], *early, *late)


def draft_and_verify(
    view: DecodeView, slots: Slots, choice: Choice, rules: Rules, copies: Copies | None = None
) -> tuple[Slots, BlockStats]:
    """One round: propose, verify in one pass of the target, keep what stands and one token more. `copies`: what `ngram`
    has found."""
    length = choice.draft_length
    with jax.named_scope("draft"):
        draft_noise_GB, verify_noise_BW = round_noise(slots, length, view.shape.vocab, rules.verification)
        proposal = DRAFTERS[choice.drafter](view, context_of(slots, draft_noise_GB, copies), choice, rules)
    with jax.named_scope("verify"):
        positions_BW = slots.length_B[:, None] - 1 + jnp.arange(length + 1)
        states_BWE, x_BWD, cache = run_target(view, proposal.cache, proposal.states_BWD, positions_BW, proposal.depth)
        policy = policy_of(logits(view, x_BWD), slots.sampling.temperature_B)
        outcome = _outcome(policy, proposal, slots.sampling, verify_noise_BW, rules)
    slots = replace(slots, cache=cache)
    if slots.states_BTE is not None:
        slots = replace(slots, states_BTE=write_rows(slots.states_BTE, states_BWE, positions_BW))
    slots, stats = _emit(slots, proposal.drafted_B, outcome)
    draft_caches = {name: standing(cache, slots.length_B) for name, cache in proposal.draft_caches.items()}
    return replace(slots, draft_caches=draft_caches), stats


class Outcome(NamedTuple):
    """How many drafts stand; they and the token after them, then anything; log-probs of those, under the policy at the
    temperature and under what generated them."""

    accepted_B: jax.Array
    tokens_BW: jax.Array
    policy_logp_BW: jax.Array
    sampler_logp_BW: jax.Array


def _outcome(
    policy: Policy, proposal: Proposal, sampling: SamplingParams, noise_BW: jax.Array, rules: Rules
) -> Outcome:
    drafts_BG, drafted_B = proposal.drafts_BG, proposal.drafted_B
    if rules.draws == "greedy":
        accepted_B, next_B = verify_own(likeliest(policy), drafts_BG, drafted_B)
        generated_BWV = None
    else:
        verify = VERIFIERS[rules.verification]
        if rules.verification == "lenient":
            verify = partial(verify, threshold=rules.accept_threshold, by_entropy=rules.by_entropy)
        p_BWV = sampling_probs(policy, sampling, rules.filtered, rules.draws)
        accepted_B, next_B, generated_BWV = verify(p_BWV, drafts_BG, proposal.q_BGV, drafted_B, noise_BW)
    after_BW = jnp.arange(drafts_BG.shape[1] + 1) >= accepted_B[:, None]
    tokens_BW = jnp.where(after_BW, next_B[:, None], jnp.pad(drafts_BG, ((0, 0), (0, 1))))
    policy_logp_BW = policy.log_probs(tokens_BW)
    if generated_BWV is None:
        return Outcome(accepted_B, tokens_BW, policy_logp_BW, jnp.zeros_like(policy_logp_BW))
    generated_BW = jnp.take_along_axis(generated_BWV, tokens_BW[..., None], axis=-1)[..., 0]
    return Outcome(accepted_B, tokens_BW, policy_logp_BW, jnp.log(generated_BW))


def round_noise(slots: Slots, draft_length: int, vocab: int, verification: str) -> tuple[jax.Array, jax.Array]:
    """(the drafter's noise, G first; the verifier's), see `pick`. That of the token after the drafts is the same for
    any number of them.

    Uniforms, fresh for each block: keyed by the request's seed and the block's start. Keyed by position alone they
    would be seen again after a rejection, and bias what is drawn. Only `coupled` wants that: Gumbel noise keyed by
    seed and position, the same for drafter and verifier.
    """

    def key_of(key, place):
        return jax.random.fold_in(jax.random.wrap_key_data(key), place)

    if verification == "coupled":
        positions_BW = slots.length_B[:, None] + jnp.arange(draft_length + 1)
        keys_BW = jax.vmap(jax.vmap(key_of, (None, 0)))(slots.key_B2, positions_BW)
        gumbel_BWV = jax.vmap(jax.vmap(lambda key: jax.random.gumbel(key, (vocab,))))(keys_BW)
        return gumbel_BWV[:, :-1].swapaxes(0, 1), gumbel_BWV
    keys_B = jax.vmap(key_of)(slots.key_B2, slots.length_B)
    uniform_BU = jax.vmap(lambda key: jax.random.uniform(key, (2 * draft_length + 1,)))(keys_B)
    after_B1, verify_BG, draft_BG = jnp.split(uniform_BU, (1, draft_length + 1), axis=1)
    return draft_BG.T, jnp.concatenate([verify_BG, after_B1], axis=1)


def _emit(slots: Slots, drafted_B: jax.Array, outcome: Outcome) -> tuple[Slots, BlockStats]:
    """Appends the accepted drafts and the next token, up to the first end and the limit, with their log-probs."""
    total, accepted_B, emitted_BW = slots.tokens_BT.shape[1], outcome.accepted_B, outcome.tokens_BW
    offset_W = jnp.arange(emitted_BW.shape[1])
    is_end_BW = jnp.any(emitted_BW[..., None] == slots.ends_BE[:, None], axis=-1) & (offset_W <= accepted_B[:, None])
    ends_before_BW = jnp.cumsum(is_end_BW, axis=1) - is_end_BW
    room_B = slots.limit_B - slots.length_B
    kept_BW = (
        (offset_W <= accepted_B[:, None])
        & (ends_before_BW == 0)
        & (offset_W < room_B[:, None])
        & ~slots.done_B[:, None]
    )
    count_B = jnp.sum(kept_BW, axis=1)
    ended_B = slots.ended_B | jnp.any(kept_BW & is_end_BW, axis=1)
    length_B = slots.length_B + count_B

    # What is not kept is sent beyond the end, each to a place of its own, and dropped.
    where_BW = jnp.where(kept_BW, slots.length_B[:, None] + offset_W, total + offset_W)
    active_B = ~slots.done_B
    drafted_B = jnp.where(active_B, drafted_B, 0)
    kept_B = jnp.minimum(count_B, accepted_B)
    draft_G = offset_W[:-1]
    stats = BlockStats(
        rounds=jnp.int32(1),
        calls=active_B.astype(jnp.int32),
        emitted=count_B,
        offered_G=(draft_G < drafted_B[:, None]).astype(jnp.int32),
        kept_G=((draft_G < accepted_B[:, None]) & active_B[:, None]).astype(jnp.int32),
    )
    slots = replace(
        slots,
        tokens_BT=write_rows(slots.tokens_BT, emitted_BW, where_BW),
        length_B=length_B,
        ended_B=ended_B,
        done_B=slots.done_B | ended_B | (length_B >= slots.limit_B),
        policy_logp_BT=write_rows(slots.policy_logp_BT, outcome.policy_logp_BW, where_BW),
        sampler_logp_BT=write_rows(slots.sampler_logp_BT, outcome.sampler_logp_BW, where_BW),
        target_calls_B=slots.target_calls_B + active_B,
        drafted_B=slots.drafted_B + drafted_B,
        accepted_B=slots.accepted_B + kept_B,
    )
    return slots, stats
