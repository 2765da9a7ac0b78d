"""Stage 3, first phase: a Bradley-Terry reward model on pairs of the real completion against the policy's own."""

import logging
from functools import partial
from typing import Any

import jax
import numpy as np

from tlt_jax.config import ConfigError
from tlt_jax.data import Tasks
from tlt_jax.models.declare import initialise
from tlt_jax.parallel.hosts import put, to_host
from tlt_jax.parallel.sharding import abstract, put_batch, replicated
from tlt_jax.rl.objectives import sequence_rewards
from tlt_jax.stages.loop import Phase, PhaseState, Step, models_of
from tlt_jax.stages.models import Models, by_role
from tlt_jax.stages.rollouts import Sampler, by_batches, real_sequences, request_seeds
from tlt_jax.stages.run import Run
from tlt_jax.stages.training import reward_training
from tlt_jax.stages.updates import microbatches

log = logging.getLogger("tlt_jax")

Pairs = dict[str, np.ndarray]
Pair = tuple[
    np.ndarray, int, np.ndarray, int, int
]  # the real sequence, its length; the policy's own, its; the prompt's
FEW, FEW_MADE = 0.25, ": few of those asked for, so that what is learned and measured on them means little"
ROUNDS = 8  # at most so many completions are drawn for each pair asked for


class RewardModel(Phase):
    """Trains a copy of the policy's transformer and a scalar head to tell real completions from the policy's own."""

    stage, name = "align", "reward_model"

    def __init__(self, run: Run, sampler: Sampler):
        self.config = config = run.config.align.reward_model
        self.run, self.sampler = run, sampler
        self.eval_every, self.end = config.eval_every, config.share
        self.training = reward_training(run.config, run.shape, run.mesh)
        self.update = self.training.update()
        self._rewards = jax.jit(partial(sequence_rewards, dtype=run.dtype))

    def init(self, models: Models) -> PhaseState:
        """The reward model starts as the policy, with a head of zeros."""
        head = initialise(self.training.roles["reward"].build, self.run.mesh, jax.random.key(self.run.config.run.seed))
        train = self.training.new_state({"reward_trunk": models.policy, "reward": head})
        pairs = put(self._without_pairs(), replicated(self.run.mesh))
        return PhaseState({"train": train, "pairs": pairs, **by_role(models)}, fit_scale(np.zeros(1), np.zeros(1)))

    def shapes(self) -> dict[str, Any]:
        pairs, everywhere = self._without_pairs(), replicated(self.run.mesh)
        return {
            "train": self.training.abstract_state(),
            "pairs": abstract(pairs, jax.tree.map(lambda _: everywhere, pairs)),
            **by_role(self.training.abstract_models()),
        }

    def prepare(self, state: PhaseState) -> PhaseState:
        data, config, models = self.run.corpus, self.config, models_of(state)
        pairs = {
            "train": self._make_pairs(models, data.train_tasks, config.pairs, "training pairs"),
            "held_out": self._make_pairs(models, data.held_out_tasks, config.held_out_pairs, "held-out pairs"),
        }
        return PhaseState({**state.arrays, "pairs": put(pairs, replicated(self.run.mesh))}, state.host)

    def step(self, state: PhaseState, step: Step) -> tuple[PhaseState, dict[str, Any], int]:
        pairs = to_host(state.arrays["pairs"]["train"])
        real = np.flatnonzero(pairs["weights"])
        chosen = np.random.default_rng([self.run.config.run.seed, step.index]).choice(real, self.config.batch_size)
        drawn = {name: array[chosen] for name, array in pairs.items()}
        batch = put_batch(self.run.mesh, microbatches(drawn, self.config.accumulation), leading=1)
        train, metrics = self.update(state.arrays["train"], batch, np.float32(step.progress))
        tokens = pairs["chosen_length"][chosen].sum() + pairs["rejected_length"][chosen].sum()
        return PhaseState({**state.arrays, "train": train}, state.host), metrics, int(tokens)

    def evaluate(self, state: PhaseState, when: str) -> tuple[PhaseState, dict[str, float]]:
        """Held-out accuracy and AUC, beside what length alone achieves, in the direction the training pairs teach."""
        train, held_out = (_real(to_host(state.arrays["pairs"][which])) for which in ("train", "held_out"))
        chosen, rejected = (self._scores(state, held_out, side) for side in ("chosen", "rejected"))
        longer_is_real = 2 * share_won(train["chosen_length"], train["rejected_length"]) >= 1
        by_length = share_won(held_out["chosen_length"], held_out["rejected_length"])
        metrics = {
            "eval/accuracy": share_won(chosen, rejected),
            "eval/auc": float(np.mean([share_won(np.full_like(rejected, c), rejected) for c in chosen])),
            "eval/length_accuracy": by_length if longer_is_real else 1.0 - by_length,
            "eval/pairs": len(chosen),
            "eval/training_pairs": len(train["chosen"]),
        }
        own_length = held_out["rejected_length"] - held_out["prompt_length"]
        return PhaseState(state.arrays, fit_scale(rejected, own_length)), metrics

    def _scores(self, state: PhaseState, pairs: Pairs, side: str) -> np.ndarray:
        params = state.arrays["train"].params
        batch = {"tokens": pairs[side], "length": np.maximum(pairs[f"{side}_length"], 1)}
        return by_batches(
            self.run.mesh,
            self.config.batch_size,
            lambda b: self._rewards(params["reward_trunk"], params["reward"], b["tokens"], b["length"]),
            batch,
        )

    def _without_pairs(self) -> dict[str, Pairs]:
        config = self.config
        return {"train": self._no_pairs(config.pairs), "held_out": self._no_pairs(config.held_out_pairs)}

    def _no_pairs(self, count: int) -> Pairs:
        limits = self.run.config.data.tasks
        rows = np.zeros((count, limits.max_prompt_tokens + limits.max_completion_tokens), np.int32)
        lengths = np.zeros(count, np.int32)
        return {
            "chosen": rows,
            "rejected": rows.copy(),
            "prompt_length": lengths,
            "chosen_length": lengths.copy(),
            "rejected_length": lengths.copy(),
            "weights": np.zeros(count, np.float32),
        }

    def _make_pairs(self, models: Models, tasks: Tasks, wanted: int, what: str) -> Pairs:
        """Up to `wanted` pairs of real and own completion of the same prompt, the own one ended and matched in length.

        Among the pairs, the real completion is the longer one as often as the shorter: what is over is left out.
        """
        log.info("making %s: %d asked for", what, wanted)
        found: dict[str, list[Pair]] = {"longer": [], "shorter": [], "equal": []}
        for attempt in range(ROUNDS):
            self.run.check_stop()
            count = 2 * min(len(found["longer"]), len(found["shorter"])) + len(found["equal"])
            self.run.progress.prepare(f"making {what}", min(count / wanted, 1.0))
            if count >= wanted:
                break
            random = np.random.default_rng([self.run.config.run.seed, attempt, wanted])
            indices = random.choice(len(tasks), wanted, replace=len(tasks) < wanted)
            seeds = request_seeds(self.run.config.run.seed, what, attempt, wanted)
            rollout = self.sampler.rollout(models, [tasks.prompts[i] for i in indices], seeds)
            real, prompt_length, length = real_sequences(tasks, indices, rollout.tokens_BT.shape[1])
            own, ours = rollout.completion_length_B, length - prompt_length
            near = np.abs(own - ours) <= self.config.length_tolerance * np.maximum(own, ours)
            copied = np.all(real == rollout.tokens_BT, axis=1)
            for row in np.flatnonzero(rollout.ended_B & near & ~copied):
                kind = "equal" if own[row] == ours[row] else "longer" if ours[row] > own[row] else "shorter"
                pair = real[row], int(length[row]), rollout.tokens_BT[row], int(rollout.length_B[row])
                found[kind].append((*pair, int(prompt_length[row])))
        kept = balanced(found, wanted)
        self.run.progress.prepare(f"making {what}", 1.0)
        few = len(kept) < FEW * wanted
        log.log(logging.WARNING if few else logging.INFO, "%d %s made%s", len(kept), what, FEW_MADE if few else "")
        if not kept:
            raise ConfigError(
                f"`align.reward_model.length_tolerance` is {self.config.length_tolerance}, within which no {what} were"
                " found: the policy's completions do not end, or tasks are too few"
            )
        pairs = self._no_pairs(wanted)
        for i, (chosen, chosen_length, rejected, rejected_length, prompt) in enumerate(kept):
            pairs["prompt_length"][i] = prompt
            pairs["chosen"][i], pairs["chosen_length"][i] = chosen, chosen_length
            pairs["rejected"][i], pairs["rejected_length"][i] = rejected, rejected_length
            pairs["weights"][i] = 1.0
        return pairs


def fit_scale(scores: np.ndarray, lengths: np.ndarray) -> dict[str, float]:
    """The line through scores over lengths, and the deviation around it: what `scaled` takes out and divides by.

    The pairs are matched in length, so the model learns nothing of how completions of different lengths compare; what
    it says of that is chance, which a policy would exploit. Scores that hardly differ are not blown up.
    """
    centred = lengths - lengths.mean()
    variance = float((centred**2).mean())
    slope = float((centred * scores).mean() / variance) if variance > 0 else 0.0
    spread = float((scores - scores.mean() - slope * centred).std())
    return {
        "score_mean": float(scores.mean()),
        "length_mean": float(lengths.mean()),
        "score_slope": slope,
        "score_std": spread if spread > 0.05 else 1.0,
    }


def scaled(scores: np.ndarray, lengths: np.ndarray, scale: dict[str, float]) -> np.ndarray:
    """Scores in standard deviations above what a completion of that length gets on average (`fit_scale`)."""
    expected = scale["score_mean"] + scale["score_slope"] * (lengths - scale["length_mean"])
    return (scores - expected) / scale["score_std"]


def balanced(found: dict[str, list[Pair]], wanted: int) -> list[Pair]:
    """At most `wanted` of the pairs, those with the longer real completion as many as those with the shorter one."""
    both = min(len(found["longer"]), len(found["shorter"]), max(wanted - len(found["equal"]), 0) // 2)
    return found["equal"][:wanted] + found["longer"][:both] + found["shorter"][:both]


def share_won(a: np.ndarray, b: np.ndarray) -> float:
    """Share of places where a > b, ties counted half."""
    return float(np.mean((a > b) + 0.5 * (a == b)))


def trained_reward(last: PhaseState | None) -> PhaseState | None:
    """Of the phase's last state, what judges completions: the model, and the scale of its scores. None of None."""
    if last is None:
        return None
    params = last.arrays["train"].params
    return PhaseState({name: params[name] for name in ("reward_trunk", "reward")}, last.host)


def _real(pairs: Pairs) -> Pairs:
    return {name: array[pairs["weights"] > 0] for name, array in pairs.items()}
