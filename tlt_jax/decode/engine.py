"""The engine: a pool of slots that takes requests, decodes them in compiled blocks, and gives back a `Rollout`.

`admit` fills free slots, `step` runs one compiled block and collects what finished, `run` does both until all requests
are done. The host looks at the slots between blocks alone.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from tlt_jax.config import ConfigError
from tlt_jax.decode.loop import Admission, Slots, decode_block, empty_slots, prefill, slot_shardings
from tlt_jax.decode.propose import DraftSpec
from tlt_jax.decode.rollout import Rollout
from tlt_jax.decode.sampling import SamplingParams
from tlt_jax.models.decode_view import DecodeView, decode_view, view_shardings
from tlt_jax.models.heads import ShallowExit
from tlt_jax.models.transformer import ModelShape, Transformer
from tlt_jax.parallel.hosts import put, to_host
from tlt_jax.parallel.programs import Program
from tlt_jax.parallel.sharding import abstract, batch_sharding


@dataclass(frozen=True)
class Request:
    """One sequence to complete: its prompt's tokens, how many may follow, how it is sampled, and its own seed."""

    prompt: np.ndarray
    max_new_tokens: int
    seed: int
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0


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
    """A pool of `slots` sequences of up to `max_prompt` + `max_new` tokens, decoded on `mesh`.

    Its compiled programs depend on the sizes given here alone: one for a block, and one prefill for the whole pool, a
    quarter of it, a sixteenth and so on, whichever is the smallest that holds the prompts admitted together.
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
        draft: DraftSpec,
        dtype: Any,
        block_verifies: int = 8,
    ):
        self.mesh, self.max_prompt, self.max_new = mesh, max_prompt, max_new
        # The batch axis is split over the mesh, so the pool is rounded up to its size.
        self.parts = mesh.shape["data"] * mesh.shape["fsdp"]
        self.slots = -(-slots // self.parts) * self.parts
        self.draft_length = 0 if draft.drafter == "off" else draft.draft_length
        draft = DraftSpec(draft.drafter, self.draft_length, draft.filtered, draft.ngram_min, draft.ngram_max)
        self.draft = draft
        self._eos = np.asarray(list(eos), np.int32)
        self._slots_lie = slots_lie = slot_shardings(shape, mesh)
        self._view = jax.jit(partial(decode_view, dtype=dtype), out_shardings=view_shardings(shape, mesh))
        self._prefill = jax.jit(prefill, donate_argnums=1, out_shardings=slots_lie)
        block = partial(decode_block, spec=draft, verifies=block_verifies)
        self.block = Program("decode block", jax.jit(block, donate_argnums=2, out_shardings=slots_lie), mesh)
        empty = partial(empty_slots, shape, self.slots, max_prompt + max_new, dtype)
        self._empty = jax.jit(empty, out_shardings=slots_lie)
        self._row = batch_sharding(mesh)
        self.reset()

    def reset(self) -> None:
        """Frees every slot, and the memory of the pool until the next request."""
        self._state: Slots | None = None
        self._owner: list[int | None] = [None] * self.slots

    def view(self, model: Transformer) -> DecodeView:
        """The decode view of the current parameters: make it once an update, and pass it to `admit`, `step`, `run`."""
        return self._view(model)

    @property
    def free(self) -> int:
        return self._owner.count(None)

    def admit(self, view: DecodeView, requests: Sequence[tuple[int, Request]]) -> None:
        """Puts (id, request) pairs into free slots. Raises ConfigError for what the pool cannot hold."""
        for _, request in requests:
            self._check(request)
        free = [slot for slot, owner in enumerate(self._owner) if owner is None]
        assert len(requests) <= len(free)
        rows = self._prefill_rows(len(requests))
        slot_ids = np.full(rows, self.slots, np.int32)
        tokens = np.zeros((rows, self.max_prompt), np.int32)
        length, limit = np.ones(rows, np.int32), np.ones(rows, np.int32)
        keys = np.zeros((rows, 2), np.uint32)
        temperature, top_k, top_p = np.ones(rows, np.float32), np.zeros(rows, np.int32), np.ones(rows, np.float32)
        for row, (identity, request) in enumerate(requests):
            slot_ids[row] = slot = free[row]
            self._owner[slot] = identity
            length[row] = len(request.prompt)
            tokens[row, : length[row]] = request.prompt
            limit[row] = length[row] + request.max_new_tokens
            keys[row] = (request.seed >> 32) & 0xFFFFFFFF, request.seed & 0xFFFFFFFF
            temperature[row], top_k[row], top_p[row] = request.temperature, request.top_k, request.top_p
        if self._state is None:
            self._state = self._empty()
        admission = Admission(slot_ids, tokens, length, limit, keys, SamplingParams(temperature, top_k, top_p))
        self._state = self._prefill(view, self._state, put(admission, self._row))

    def step(self, view: DecodeView, exit: ShallowExit) -> dict[int, dict[str, np.ndarray]]:
        """Runs one compiled block. Returns the finished sequences by id, and frees their slots."""
        assert self._state is not None, "nothing was admitted"
        self._state = self.block(view, exit, self._state, self._eos)
        done = to_host(self._state.done_B)
        finished = [slot for slot, owner in enumerate(self._owner) if owner is not None and done[slot]]
        if not finished:
            return {}
        host = to_host({name: getattr(self._state, name) for name in _FIELDS})
        results = {}
        for slot in finished:
            owner = self._owner[slot]
            assert owner is not None
            results[owner] = {name: array[slot].copy() for name, array in host.items()}
            self._owner[slot] = None
        return results

    def lower_block(self, view: DecodeView, exit: ShallowExit) -> jax.stages.Lowered:
        """The compiled block for a view and an exit of these shapes and shardings, which may be abstract."""
        slots = abstract(jax.eval_shape(self._empty), self._slots_lie)
        return self.block.lower(view, exit, slots, self._eos)

    def run(self, view: DecodeView, exit: ShallowExit, requests: Sequence[Request]) -> Rollout:
        """Completes every request; a finished slot takes the next prompt. The rollout is in the requests' order."""
        waiting = list(enumerate(requests))[::-1]
        results: dict[int, dict[str, np.ndarray]] = {}
        with jax.set_mesh(self.mesh):
            while len(results) < len(requests):
                if waiting and self.free:
                    self.admit(view, [waiting.pop() for _ in range(min(self.free, len(waiting)))])
                results.update(self.step(view, exit))
        return _collect([results[i] for i in range(len(requests))], requests)

    def _prefill_rows(self, count: int) -> int:
        """The smallest of slots, slots / 4, slots / 16, ... that holds `count`, as the mesh divides it."""
        rows = self.slots
        while rows >= 4 * max(count, self.parts):
            rows //= 4
        return -(-rows // self.parts) * self.parts

    def _check(self, request: Request) -> None:
        if not 1 <= len(request.prompt) <= self.max_prompt:
            raise ConfigError(f"a prompt has {len(request.prompt)} tokens; expected 1 to {self.max_prompt}")
        if not 0 <= request.max_new_tokens <= self.max_new:
            raise ConfigError(f"max_new_tokens is {request.max_new_tokens}; expected 0 to {self.max_new}")
        if (request.top_k or request.top_p < 1.0) and not self.draft.filtered:
            raise ConfigError("a request uses top_k or top_p, which this engine was made without")


def _collect(rows: list[dict[str, np.ndarray]], requests: Sequence[Request]) -> Rollout:
    stacked = {name: np.stack([row[name] for row in rows]) for name in _FIELDS}
    return Rollout(prompt_length_B=np.array([len(r.prompt) for r in requests], np.int32), **stacked)
