"""Rollouts for the stages: one engine for a whole run, seeded requests, and texts for the rewards."""

import logging
import time
import zlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from tlt_jax.data import Tasks
from tlt_jax.decode.admission import Request
from tlt_jax.decode.controller import make_controller
from tlt_jax.decode.engine import Engine
from tlt_jax.decode.propose import Rules
from tlt_jax.decode.rollout import Rollout, rollout_metrics
from tlt_jax.parallel.hosts import to_host
from tlt_jax.parallel.sharding import put_batch
from tlt_jax.rl.objectives import sequence_log_probs
from tlt_jax.rl.rewards import Completion
from tlt_jax.stages.models import Models, by_role, draft_shape
from tlt_jax.stages.run import Run

Found = TypeVar("Found")

log = logging.getLogger("tlt_jax")


class Sampler:
    """Draws completions of tasks from a model, with the config's sampling and drafter, and scores sequences.

    One engine and one compiled scorer serve training, evaluation and the reward model's pairs.
    """

    def __init__(self, run: Run, shape: Any):
        config = run.config
        tasks, speculation, sampling = config.data.tasks, config.speculation, config.sampling
        filtered = bool(sampling.top_k or sampling.top_p < 1.0)
        rules = Rules(
            filtered=filtered,
            draws="any" if "distill" in config.stages and config.distill.greedy_fraction else "sampled",
            verification=speculation.verification,
            accept_threshold=speculation.accept_threshold,
            by_entropy=speculation.accept_by_entropy,
            ngram_min=speculation.ngram_min,
            ngram_max=speculation.ngram_max,
            ngram_siblings=speculation.ngram_siblings,
            ngram_history=speculation.ngram_history,
        )
        if speculation.verification == "lenient":
            log.warning("speculation.verification is lenient: rollouts are LOSSY, not drawn from the policy alone")
        if filtered and set(config.stages) - {"pretrain", "distill"}:
            log.info(
                "top_k or top_p cuts the rollouts' distribution, the policy's ratio does not: its gradient is biased"
            )
        self.run = run
        self.engine = Engine(
            shape,
            run.mesh,
            slots=speculation.slots,
            max_prompt=tasks.max_prompt_tokens,
            max_new=tasks.max_completion_tokens,
            eos=[run.corpus.tokenizer.eos_id],
            controller=make_controller(speculation, config.run.seed),
            dtype=run.dtype,
            rules=rules,
            block_verifies=speculation.block_verifies,
            sizes=speculation.pool_sizes,
            led=lambda number: run.company.agree("draft", number)[0],
            draft_shape=draft_shape(config, shape),
        )
        state = (run.document or {}).get("controller") or {}
        if state.get("name") == type(self.engine.controller).__name__:
            self.engine.controller.load(state)
        self._last: Any = None
        self._warm = False
        self._fingerprint = jax.jit(lambda tree: [jnp.sum(jnp.abs(a)) for a in jax.tree.leaves(tree)])
        self._log_probs = jax.jit(partial(sequence_log_probs, temperature=sampling.temperature, dtype=run.dtype))

    def state(self) -> dict[str, Any]:
        """What the controller has learned, in plain JSON values, for a checkpoint."""
        controller = self.engine.controller
        return {"name": type(controller).__name__, **controller.to_dict()}

    def drafting(self) -> list[dict[str, Any]]:
        """What was measured of each size of the pool and each choice of drafter and draft length, in this run."""
        return self.engine.controller.seen.table()

    def remembered(self, models: Models, find: Callable[[], Found]) -> Found:
        """What `find` gives for these models, or gave the last time if it was for the same parameters."""
        print_of = to_host(self._fingerprint(by_role(models)))
        if self._last is None or self._last[0] != print_of:
            self._last = (print_of, find())
        return self._last[1]

    def rollout(self, models: Models, prompts: Sequence[np.ndarray], seeds: Sequence[int], greedy: int = 0) -> Rollout:
        """One completion a prompt; those of the first `greedy` prompts at temperature 0."""
        sampling, limit = self.run.config.sampling, self.run.config.data.tasks.max_completion_tokens
        heat = [0.0] * greedy + [sampling.temperature] * (len(prompts) - greedy)
        requests = [
            Request(prompt, limit, seed, temperature, sampling.top_k, sampling.top_p)
            for prompt, seed, temperature in zip(prompts, seeds, heat, strict=True)
        ]
        view = self.engine.view(models.policy, models.exit, models.eagle, models.draft_model)
        if not self._warm:
            self._warm, start = True, time.monotonic()
            count = self.engine.warm_up(view)
            sizes, seconds = ", ".join(map(str, self.engine.sizes)), time.monotonic() - start
            log.info("decoding: %d programs compiled in %.1f s, for pools of %s", count, seconds, sizes)
        return self.engine.run(view, requests)

    def metrics(self, rollout: Rollout, seconds: float) -> dict[str, float]:
        """The `rollout/` metrics of a rollout that took `seconds`."""
        speed = float(rollout.completion_length_B.sum() / max(seconds, 1e-9))
        return {**rollout_metrics(rollout, self.engine.mean_draft_length), "rollout/tokens_per_second": speed}

    def completions(self, rollout: Rollout, tasks: Tasks, indices: Sequence[int] | np.ndarray) -> list[Completion]:
        """What the rewards see of a rollout of the tasks that `indices` pick."""
        tokenizer, check = self.run.corpus.tokenizer, self.run.config.data.tasks.check
        prompts = [tasks.prompts[index] for index in indices]
        return [
            Completion(
                prompt=tokenizer.decode(prompts[row]),
                text=tokenizer.decode_after(prompts[row], tokens),
                tokens=tokens,
                ended=bool(rollout.ended_B[row]),
                accepted=int(rollout.accepted_B[row]),
                target_calls=int(rollout.target_calls_B[row]),
                reference=tokenizer.decode_after(prompts[row], tasks.completions[indices[row]]),
                check=check,
            )
            for row, tokens in enumerate(rollout.completions())
        ]

    def log_probs(self, policy: Any, tokens_BT: np.ndarray, length_B: np.ndarray) -> np.ndarray:
        """log p of each token at the sampling temperature [B, T], in batches of the engine's slots."""
        return by_batches(
            self.run.mesh,
            self.engine.slots,
            lambda b: self._log_probs(policy, b["tokens"], b["segments"]),
            {"tokens": tokens_BT, "segments": segments(tokens_BT, length_B)},
        )


def batch_rows(wanted: int, mesh: jax.sharding.Mesh) -> int:
    """`wanted` rows, rounded up to what the mesh's batch axes divide."""
    parts = mesh.shape["data"] * mesh.shape["fsdp"]
    return -(-wanted // parts) * parts


def by_batches(mesh: jax.sharding.Mesh, size: int, function: Any, batch: dict[str, np.ndarray]) -> Any:
    """Applies `function` to batches of `size` rows, the last filled up with zeros; joins the results on the host."""
    rows = len(next(iter(batch.values())))
    parts = []
    with jax.set_mesh(mesh):
        for start in range(0, rows, size):
            part = {name: array[start : start + size] for name, array in batch.items()}
            missing = size - len(next(iter(part.values())))
            padded = {name: np.pad(a, ((0, missing), *((0, 0) for _ in a.shape[1:]))) for name, a in part.items()}
            found = to_host(function(put_batch(mesh, padded)))
            parts.append(jax.tree.map(lambda a, n=size - missing: a[:n], found))
    return jax.tree.map(lambda *pieces: np.concatenate(pieces), *parts)


def segments(tokens_BT: np.ndarray, length_B: np.ndarray) -> np.ndarray:
    """1 on each sequence, 0 on the padding after it."""
    return (np.arange(tokens_BT.shape[1]) < length_B[:, None]).astype(np.int32)


def request_seeds(seed: int, what: str, step: int, count: int) -> list[int]:
    """A 64-bit seed for each of `count` requests, fixed by the run's seed, what they are for, and the step."""
    words = np.random.SeedSequence([seed, zlib.crc32(what.encode()), step]).generate_state(2 * count)
    return [(int(high) << 32) | int(low) for high, low in words.reshape(-1, 2)]


def real_sequences(
    tasks: Tasks, indices: Sequence[int] | np.ndarray, length: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(tokens [B, length], prompt lengths, lengths) of prompts with their real completions."""
    tokens = np.zeros((len(indices), length), np.int32)
    prompt_length, lengths = np.zeros(len(indices), np.int32), np.zeros(len(indices), np.int32)
    for row, index in enumerate(indices):
        whole = np.concatenate([tasks.prompts[index], tasks.completions[index]])
        tokens[row, : len(whole)] = whole
        prompt_length[row], lengths[row] = len(tasks.prompts[index]), len(whole)
    return tokens, prompt_length, lengths
