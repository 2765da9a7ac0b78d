"""The engine: a pool of slots that takes requests, decodes them in compiled blocks, and gives back a `Rollout`.

`admit` fills free slots, `step` runs one compiled block and collects what finished, `run` does both until all requests
are done. The host looks at the slots between blocks alone. As the last sequences thin out, `run` goes on in a smaller
pool.
"""

import time
from collections.abc import Callable, Container, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from tlt_jax.config import ConfigError
from tlt_jax.decode.admission import Request, packed, prefill
from tlt_jax.decode.controller import Controller
from tlt_jax.decode.history import History
from tlt_jax.decode.loop import (
    Patience,
    Slots,
    decode_block,
    empty_slots,
    resized,
    slot_shardings,
)
from tlt_jax.decode.propose import Choice, Rules
from tlt_jax.decode.rollout import Rollout
from tlt_jax.decode.seen import Block, Seen
from tlt_jax.decode.stops import cut, first_stop
from tlt_jax.decode.timing import measured, without
from tlt_jax.models.decode_view import DecodeView, decode_view, view_shardings
from tlt_jax.models.eagle import Eagle
from tlt_jax.models.heads import ShallowExit
from tlt_jax.models.transformer import ModelShape, Transformer
from tlt_jax.parallel.hosts import put, to_host
from tlt_jax.parallel.programs import Program
from tlt_jax.parallel.sharding import abstract, batch_sharding, replicated

# A decode view's leaves. JAX flattens the view's flax modules in Python at every call, in as long as it takes to decode
# ten tokens; the engine does so once an update.
Leaves = tuple[jax.Array, ...]

PLAIN = Rules()
SHRINK = 4  # how many times smaller the next pool is
LONG = 16  # how many times as many rounds a block may go on for, where nobody waits for what it has finished


_FIELDS = (
    "tokens_BT",
    "length_B",
    "policy_logp_BT",
    "sampler_logp_BT",
    "ended_B",
    "target_calls_B",
    "drafted_B",
    "accepted_B",
)


class Engine:
    """A pool of up to `slots` sequences of up to `max_prompt` + `max_new` tokens, decoded on `mesh`.

    Its compiled programs depend on the sizes given here alone: a pool of `slots`, a quarter of it, and so on (`sizes`
    of them); for each, one block for each of the controller's choices, one prefill for each size that it can take in,
    and the way to the next size. `warm_up` compiles them all, and times the blocks. `text` decodes tokens, for requests
    with `stop`. `led` gives every process the number that the first process has passed to it.
    `draft_shape`: the draft model's, where it may draft.
    """

    def __init__(
        self,
        shape: ModelShape,
        mesh: Mesh,
        *,
        slots: int,
        max_prompt: int,
        max_new: int,
        eos: Sequence[int],
        controller: Controller,
        dtype: Any,
        rules: Rules = PLAIN,
        block_verifies: int = 8,
        sizes: int = 1,
        most_ends: int = 1,
        text: Callable[[np.ndarray], str] | None = None,
        led: Callable[[int], int] = lambda number: number,
        draft_shape: ModelShape | None = None,
    ):
        self.mesh, self.max_prompt, self.max_new = mesh, max_prompt, max_new
        # The batch axis is split over the mesh, so a pool is rounded up to its size.
        self.parts = mesh.shape["data"] * mesh.shape["fsdp"]
        self.sizes = _pool_sizes(slots, sizes, self.parts)
        self.slots, self.rules, self.controller, self.text = self.sizes[0], rules, controller, text
        self._led, self._verifies = led, block_verifies
        self._starts: dict[int, float] = {}  # what the start of a block takes, of a pool of each size, once measured
        self.draft_length = max(choice.draft_length for choice in controller.choices)
        self._eos = tuple(eos)
        self._ends = max(most_ends, len(self._eos), 1)
        drafters = {choice.drafter for choice in controller.choices}
        layers = {"eagle": replace(shape, layers=1), "draft_model": draft_shape}
        own = {name: s for name, s in layers.items() if name in drafters and s is not None}
        assert drafters & layers.keys() <= own.keys(), "the draft model's shape is not given"
        self._own, self._slots_lie = own.keys(), slot_shardings(shape, mesh, own)
        slots_lie = self._slots_lie
        view_lies = view_shardings(shape, mesh, "eagle" in own, own.get("draft_model"))
        self._structure = jax.tree.structure(view_lies)
        self._view = jax.jit(partial(decode_view, dtype=dtype, length=max_prompt + max_new), out_shardings=view_lies)

        def fill(leaves: Leaves, slots: Slots, new_AC: jax.Array, feeds: dict[str, Any]) -> Slots:
            return prefill(self.whole(leaves), slots, new_AC, feeds, max_prompt)

        def decode(leaves: Leaves, slots: Slots, patience: Patience, choice: Choice) -> tuple[Slots, Any]:
            return decode_block(self.whole(leaves), slots, patience, choice, rules)

        self._prefill = jax.jit(fill, donate_argnums=1, out_shardings=slots_lie)
        self._resized = jax.jit(resized, out_shardings=slots_lie)
        self.blocks = {
            choice: Program(
                " ".join(["decode block", choice.drafter, *([str(choice.draft_length)] * (choice.draft_length > 0))]),
                jax.jit(
                    partial(decode, choice=choice),
                    donate_argnums=1,
                    out_shardings=(slots_lie, replicated(mesh)),
                ),
                mesh,
                varies=1,
            )
            for choice in controller.choices
        }

        def empty(size: int) -> Slots:
            return empty_slots(shape, size, max_prompt + max_new, self._ends, rules, dtype, own)

        self._empty = jax.jit(empty, static_argnums=0, out_shardings=slots_lie)
        self._row = batch_sharding(mesh)
        self._history = History(rules, max_prompt + max_new) if "ngram" in drafters else None
        self.reset()

    def reset(self) -> None:
        """Frees every slot, and the memory of the pool until the next request."""
        self._state: Slots | None = None
        self._owner: list[tuple[int, Request] | None] = []
        self._drafting = {choice.drafter for choice in self.controller.choices[:1] if len(self.blocks) == 1}
        # Since `run` began: verifications of sequences, drafts asked for, what the rounds have taken.
        self._calls, self._asked, self.round_seconds = 0, 0, 0.0

    @property
    def mean_draft_length(self) -> float:
        """Of the latest `run`: drafts that were asked for, a verification of a sequence."""
        return self._asked / max(self._calls, 1)

    def view(
        self, model: Transformer, exit: ShallowExit, eagle: Eagle | None = None, draft_model: Transformer | None = None
    ) -> Leaves:
        """The leaves of the decode view (`whole`) of the current parameters, the drafters' too (`eagle` and
        `draft_model` where they may be chosen): make it once an update, and pass it to `admit`, `step`, `run`."""
        given = {"eagle": eagle, "draft_model": draft_model}
        used = {name: module if name in self._own else None for name, module in given.items()}
        assert all(used[name] is not None for name in self._own)
        return tuple(jax.tree.leaves(self._view(model, exit, **used)))

    def whole(self, view: Leaves) -> DecodeView:
        """The decode view that these are the leaves of."""
        return jax.tree.unflatten(self._structure, view)

    @property
    def active(self) -> int:
        """How many sequences are being decoded."""
        return sum(owner is not None for owner in self._owner)

    @property
    def free(self) -> int:
        """How many more the pool can take."""
        return self.slots - self.active

    def warm_up(self, view: Leaves) -> int:
        """Compiles every program that this engine will ever run; returns how many. Where there is a choice, the
        controller is told what the rounds of each take. The pool must be empty."""
        assert not self.active
        count = 0
        with jax.set_mesh(self.mesh):
            for number, size in enumerate(self.sizes):
                state = self._empty(size)
                for rows in self.sizes[number:]:
                    state = self._put_in(view, state, rows, [], self._own)
                for block in self.blocks.values():
                    state, _ = block(view, state, self._patience(size))
                for other in (*self.sizes[number + 1 : number + 2], *self.sizes[max(number - 1, 0) : number]):
                    self._resized(state, np.arange(other, dtype=np.int32))
                    count += 1
                count += 1 + len(self.sizes[number:]) + len(self.blocks)
                del state
                if len(self.blocks) > 1:
                    self._measure(view, size)
        return count

    def _measure(self, view: Leaves, size: int) -> None:
        """Times blocks of each choice on made-up sequences, and tells the controller."""
        made_up = Request(np.zeros(1, np.int32), self.max_new, 0, float(self.rules.draws != "greedy"), ends=())
        placed = [(slot, made_up) for slot in range(size)]
        state = self._put_in(view, self._empty(size), size, placed, self._own)

        def run(choice: Choice, rounds: int) -> tuple[float, int]:
            nonlocal state
            exactly = Patience(np.int32(rounds), np.int32(rounds), np.int32(0))
            state, done, stats, seconds = self._block(choice, view, state, exactly)
            if done.any():
                state = self._put_in(view, state, size, placed, self._own)
            return seconds, int(stats.rounds)

        most = LONG * self._verifies
        self._starts[size], times = measured(run, self.controller.choices, most, Seen.KNOWN, self._led)
        for choice, seconds in times:
            self.controller.time(size, choice, seconds)

    def _block(self, choice: Choice, view: Leaves, state: Slots, patience: Patience) -> tuple[Any, ...]:
        """(the pool after a block, which of its slots are done, its `BlockStats`, its seconds)."""
        jax.block_until_ready(state)  # prompts that were just admitted are not the block's time
        start = time.perf_counter()
        state, stats = self.blocks[choice](view, state, patience)
        done, stats = to_host((state.done_B, stats))
        return state, done, stats, time.perf_counter() - start

    def admit(self, view: Leaves, requests: Sequence[tuple[int, Request]]) -> None:
        """Puts (id, request) pairs into free slots, of a larger pool where they are too many for this one. Raises
        ConfigError for what no pool can hold."""
        for _, request in requests:
            self._check(request)
        assert len(requests) <= self.free
        self._fit(max(self.active + len(requests), len(self._owner)))
        free = [slot for slot, owner in enumerate(self._owner) if owner is None]
        placed = list(zip(free, requests, strict=False))
        for slot, owner in placed:
            self._owner[slot] = owner
        rows = min(size for size in self.sizes if size >= len(requests))
        assert self._state is not None
        requested = [(slot, request) for slot, (_, request) in placed]
        self._state = self._put_in(view, self._state, rows, requested, self._drafting)
        self._moved()

    def step(self, view: Leaves, until: int | None = None) -> dict[int, dict[str, np.ndarray]]:
        """Runs one compiled block. Returns the finished sequences by id, and frees their slots. It comes back soon, or
        with `until` goes on while more sequences than that are unfinished, up to `LONG` times as long."""
        assert self._state is not None, "nothing was admitted"
        choice = self._choose()
        self._drafting = {choice.drafter}
        if self._history is not None and self._history.changed and choice.drafter == "ngram":
            prompts = [owner and owner[1].prompt for owner in self._owner]
            self._state = replace(self._state, sources=put(self._history.sources(prompts), self._row))
        patience = self._patience(self.slots if until is None else until)
        self._state, done, stats, seconds = self._block(choice, view, self._state, patience)
        seconds = without(self._starts.get(len(self._owner), 0.0), seconds)
        self.controller.observe(Block(len(self._owner), choice, seconds, stats))
        self.round_seconds += seconds
        self._calls += int(stats.calls)
        self._asked += int(stats.calls) * choice.draft_length
        stopped = self._stopped()
        if stopped:  # the device does not know it yet
            done = np.isin(np.arange(len(done)), list(stopped)) | done
            self._state = replace(self._state, done_B=put(done, self._row))
        finished = [slot for slot, owner in enumerate(self._owner) if owner is not None and done[slot]]
        host = to_host({name: getattr(self._state, name) for name in _FIELDS}) if finished else {}
        results = {}
        for slot in finished:
            owner = self._owner[slot]
            assert owner is not None
            row = {name: array[slot].copy() for name, array in host.items()}
            results[owner[0]] = row = cut(row, stopped.get(slot))
            self._owner[slot] = None
            if self._history is not None:
                self._history.add(owner[1].prompt, row["tokens_BT"][: row["length_B"]])
        return results

    def lower_block(self, view: Leaves) -> jax.stages.Lowered:
        """The first choice's compiled block in the largest pool, for a view of these shapes and shardings, which may be
        abstract."""
        slots = abstract(jax.eval_shape(partial(self._empty, self.slots)), self._slots_lie)
        return self.blocks[self.controller.choices[0]].lower(view, slots, self._patience(0))

    def run(self, view: Leaves, requests: Sequence[Request]) -> Rollout:
        """Completes every request; a finished slot takes the next prompt. The rollout is in the requests' order."""
        waiting = list(enumerate(requests))[::-1]
        results: dict[int, dict[str, np.ndarray]] = {}
        self._calls, self._asked, self.round_seconds = 0, 0, 0.0
        with jax.set_mesh(self.mesh):
            while len(results) < len(requests):
                self._fit(min(self.active + len(waiting), self.slots))
                if waiting and self.free:
                    self.admit(view, [waiting.pop() for _ in range(min(self.free, len(waiting)))])
                smaller = next((size for size in self.sizes if size < len(self._owner)), 0)
                results.update(self.step(view, self.active - 1 if waiting else smaller))
        return _collect([results[i] for i in range(len(requests))], requests)

    def _choose(self) -> Choice:
        choices = self.controller.choices
        if len(choices) == 1:
            return choices[0]
        return choices[self._led(choices.index(self.controller.choose(len(self._owner))))]

    def _patience(self, until: int) -> Patience:
        """Long blocks spare the host's work between them. They are the same for every choice, so that none looks
        dearer than it is; texts with stops are looked at soon."""
        looked_at = any(owner is not None and owner[1].stop for owner in self._owner)
        most = self._verifies * (1 if looked_at else LONG)
        return Patience(*(np.int32(number) for number in (self._verifies, most, until)))

    def _fit(self, wanted: int) -> None:
        """Goes to the smallest pool that holds `wanted` sequences, size by size."""
        target = min(size for size in self.sizes if size >= max(wanted, 1))
        if self._state is None or (not self.active and len(self._owner) != target):
            self._state = None  # before the next is made: there is room for one
            self._state, self._owner = self._empty(target), [None] * target
        while len(self._owner) != target:
            here = self.sizes.index(len(self._owner))
            size = self.sizes[here + 1 if target < len(self._owner) else here - 1]
            kept = [slot for slot, owner in enumerate(self._owner) if owner is not None]
            where = np.full(size, len(self._owner), np.int32)
            where[: len(kept)] = kept
            self._state = self._resized(self._state, where)
            self._owner = [self._owner[slot] for slot in kept] + [None] * (size - len(kept))
            self._moved()

    def _moved(self) -> None:
        if self._history is not None:
            self._history.changed = True

    def _put_in(
        self, leaves: Leaves, state: Slots, rows: int, placed: Sequence[tuple[int, Request]], fed: Container[str]
    ) -> Slots:
        """The pool with (slot, request) pairs in it, filled up to `rows`; the drafters `fed` get to know them, too."""
        size = state.done_B.shape[0]
        new = put(packed(placed, rows, size, self.max_prompt, self._eos, self._ends), self._row)
        return self._prefill(leaves, state, new, {name: np.bool_(name in fed) for name in self._own})

    def _stopped(self) -> dict[int, int]:
        """{slot: length} of the sequences whose text has come to one of their stops: cut after the token with which it
        stands there."""
        asking = [slot for slot, owner in enumerate(self._owner) if owner is not None and owner[1].stop]
        if not asking:
            return {}
        assert self._state is not None and self.text is not None
        tokens, lengths = to_host((self._state.tokens_BT, self._state.length_B))
        found = {}
        for slot in asking:
            owner = self._owner[slot]
            assert owner is not None
            start, end = len(owner[1].prompt), int(lengths[slot])
            length = first_stop(self.text, tokens[slot, start:end], owner[1].stop)
            if length is not None:
                found[slot] = start + length
        return found

    def _check(self, request: Request) -> None:
        if not 1 <= len(request.prompt) <= self.max_prompt:
            raise ConfigError(f"a prompt has {len(request.prompt)} tokens; expected 1 to {self.max_prompt}")
        if not 0 <= request.max_new_tokens <= self.max_new:
            raise ConfigError(f"max_new_tokens is {request.max_new_tokens}; expected 0 to {self.max_new}")
        if (request.top_k or request.top_p < 1.0 or request.min_p) and not self.rules.filtered:
            raise ConfigError("a request uses top_k, top_p or min_p, which this engine was made without")
        if self.rules.draws == ("sampled" if request.temperature == 0 else "greedy"):
            raise ConfigError(f"a request's temperature is {request.temperature}, in an engine for {self.rules.draws}")
        if request.ends is not None and len(request.ends) > self._ends:
            raise ConfigError(f"a request has {len(request.ends)} end tokens; expected at most {self._ends}")
        if request.stop and (self.text is None or not all(request.stop)):
            raise ConfigError("a request has stop strings; expected none that is empty, and an engine that reads text")


def _pool_sizes(slots: int, sizes: int, parts: int) -> list[int]:
    """At most `sizes` sizes, each a quarter of the one before, multiples of `parts`."""
    found = [-(-slots // parts) * parts]
    while len(found) < sizes and found[-1] > parts:
        found.append(-(-found[-1] // (SHRINK * parts)) * parts)
    return found


def _collect(rows: list[dict[str, np.ndarray]], requests: Sequence[Request]) -> Rollout:
    stacked = {name: np.stack([row[name] for row in rows]) for name in (*_FIELDS, "stopped_B")}
    return Rollout(prompt_length_B=np.array([len(r.prompt) for r in requests], np.int32), **stacked)
