"""The stages' own arithmetic: budgets, pairs, packed updates, seeds, batches."""

from dataclasses import asdict

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import tiny

from tlt_jax.config import ConfigError, load_config
from tlt_jax.data import Tasks, pack_sequences
from tlt_jax.models.heads import ScalarHead
from tlt_jax.rl.objectives import PolicyTerms, policy_objective
from tlt_jax.stages.budget import Budget, Spent, phase_budget
from tlt_jax.stages.facts import _left_out
from tlt_jax.stages.finetune import _packed
from tlt_jax.stages.reward_model import balanced, fit_scale, scaled, share_won
from tlt_jax.stages.rollouts import by_batches, request_seeds, segments
from tlt_jax.stages.run import _check_shape, check_batches
from tlt_jax.train.distillation import DrafterTerms


def test_a_stage_gets_its_share_of_the_total():
    config = load_config(None, ["budget.total=1000"])
    assert phase_budget(config, "pretrain", 1.0, []) == Budget("steps", 400)
    assert phase_budget(config, "align", 1.0, []) == Budget("steps", 300)


def test_a_stage_that_runs_alone_gets_the_whole_total():
    config = load_config(None, ["budget.total=1000", "stages=[finetune]"])
    assert phase_budget(config, "finetune", 1.0, []) == Budget("steps", 1000)


def test_what_a_phase_leaves_over_is_the_next_ones():
    config = load_config(None, ["budget.total=1000", "stages=[finetune]"])
    assert phase_budget(config, "finetune", 0.3, []) == Budget("steps", 300)
    assert phase_budget(config, "finetune", 1.0, [Spent(steps=120)]) == Budget("steps", 880)
    assert phase_budget(config, "finetune", 1.0, [Spent(steps=1200)]) == Budget("steps", 0)


def test_progress_counts_the_budgets_own_unit():
    spent = Spent(steps=5, tokens=700, seconds=2.5)
    assert [Budget(unit, 10).progress(spent) for unit in ("steps", "seconds")] == [0.5, 0.25]
    assert Budget("tokens", 350).progress(spent) == 1.0
    assert Budget("steps", 0).progress(Spent()) == 1.0


def pairs(longer: int, shorter: int, equal: int):
    row = np.zeros(1)
    return {
        "longer": [(row, 9, row, 5, 3)] * longer,
        "shorter": [(row, 5, row, 9, 3)] * shorter,
        "equal": [(row, 7, row, 7, 3)] * equal,
    }


@pytest.mark.parametrize(
    ("counts", "size"), [((328, 124, 60), 308), ((500, 400, 60), 512), ((9, 0, 3), 3), ((9, 9, 600), 512)]
)
def test_length_says_nothing_about_which_of_a_pair_is_real(counts, size):
    kept = balanced(pairs(*counts), 512)
    assert len(kept) == size
    assert share_won(np.array([pair[1] for pair in kept]), np.array([pair[3] for pair in kept])) == 0.5


def test_what_the_reward_model_says_of_length_is_taken_out():
    lengths = np.array([10.0, 20.0, 30.0, 40.0])
    scores = 3.0 - 0.1 * lengths + np.array([0.2, -0.2, -0.2, 0.2])  # noise that no line fits
    scale = fit_scale(scores, lengths)
    np.testing.assert_allclose(scaled(scores, lengths, scale), [1, -1, -1, 1], atol=1e-6)
    np.testing.assert_allclose(scaled(np.array([3.0 - 0.1 * 15 + 0.4]), np.array([15]), scale), [2.0], atol=1e-6)
    assert fit_scale(np.array([1.0]), np.array([7]))["score_std"] == 1.0  # one pair: nothing to divide by


def test_share_won_counts_ties_half():
    assert share_won(np.array([3, 1, 2, 2]), np.array([1, 3, 2, 2])) == 0.5
    assert share_won(np.array([3, 2]), np.array([1, 2])) == 0.75


def sequences(seed: int = 0):
    """Eight right-padded sequences of 24 tokens at most, prompts of 3, with all that a policy update needs."""
    rng = np.random.default_rng(seed)
    lengths = np.array([24, 5, 9, 13, 7, 20, 6, 11], np.int32)
    inside = segments(np.zeros((8, 24)), lengths)
    completion = inside * (np.arange(24) >= 3)
    arrays = {
        name: (rng.normal(size=(8, 24)) * completion).astype(np.float32)
        for name in ("advantages", "old_logp", "ref_logp", "old_values", "returns")
    }
    arrays["tokens"] = (rng.integers(0, 50, (8, 24)) * inside).astype(np.int32)
    arrays["weights"] = completion.astype(np.float32)
    return arrays, lengths


def test_packed_sequences_hold_what_the_padded_ones_did():
    arrays, lengths = sequences()
    packed = pack_sequences(arrays, lengths, 1)
    assert packed["tokens"].shape == (5, 24)  # rows of 24, 20, 13 + 11, 9 + 7 + 6, and 5
    for name, array in arrays.items():
        real = packed[name][packed["segments"] > 0]
        assert sorted(real.tolist()) == sorted(array[segments(array, lengths) > 0].tolist())
    assert (packed["positions"] == 0).sum() == 8 + (packed["segments"] == 0).sum()


def test_packed_and_padded_updates_have_the_same_loss_and_gradient():
    arrays, lengths = sequences()
    positions = np.broadcast_to(np.arange(24, dtype=np.int32), (8, 24))
    padded = arrays | {"segments": segments(arrays["tokens"], lengths), "positions": positions}
    terms = PolicyTerms(0.2, 0.2, DrafterTerms(0.7, 0.3), 0.01, kl_coef=0.1, value_coef=0.5)
    objective = policy_objective(terms, dtype=jnp.float32, remat="none")
    value = tiny.random_module(lambda d: ScalarHead(tiny.SHAPE, d), 3)
    params = {"policy": tiny.transformer(), "exit": tiny.shallow_exit(), "value": value}

    @jax.jit
    def gradient(params, batch):
        prepared = objective.prepare({name: a[None] for name, a in batch.items()}, jnp.zeros((), jnp.int32))
        return jax.value_and_grad(objective.loss, has_aux=True)(params, {name: a[0] for name, a in prepared.items()})

    (one, other) = (gradient(params, batch) for batch in (padded, pack_sequences(arrays, lengths, 1)))
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-5, rtol=1e-4)


def test_requests_have_seeds_of_their_own():
    seeds = [
        *request_seeds(0, "policy", 0, 64),
        *request_seeds(0, "policy", 1, 64),
        *request_seeds(0, "ppo", 0, 64),
        *request_seeds(1, "policy", 0, 64),
    ]
    assert len(set(seeds)) == len(seeds)
    assert request_seeds(0, "policy", 0, 64) == seeds[:64]


def test_by_batches_joins_a_ragged_last_batch():
    batch = {"x": np.arange(10, dtype=np.float32)}
    np.testing.assert_array_equal(by_batches(tiny.mesh(), 4, lambda b: 2 * b["x"], batch), 2 * batch["x"])


def test_a_batch_that_the_mesh_does_not_divide_is_refused_by_name():
    config = load_config(None, ["pretrain.batch_size=16", "pretrain.accumulation=4"])
    check_batches(config, 4)
    with pytest.raises(ConfigError, match=r"pretrain.batch_size / accumulation.*is 4; expected a multiple of 8"):
        check_batches(config, 8)


@pytest.mark.parametrize("total", [1, 5, 8, 20, 99])
def test_no_step_of_the_total_is_lost_to_rounding(total):
    config = load_config(None, [f"budget.total={total}"])
    assert sum(phase_budget(config, stage, 1.0, []).amount for stage in config.stages) == total


def test_a_run_that_began_with_another_model_is_refused_by_key(tmp_path):
    old = asdict(tiny.SHAPE)
    with pytest.raises(ConfigError, match=r"`data.tokenizer` was 50, now 60; `model.width` was 16, now 32;") as caught:
        _check_shape(old, old | {"vocab": 60, "width": 32}, tmp_path)
    assert "layers" not in str(caught.value)
    _check_shape(old, dict(old), tmp_path)


def test_the_warm_up_trains_the_completions_alone():
    tasks = Tasks(
        [np.array([1, 2, 3], np.int32), np.array([4], np.int32)],
        [np.array([5, 6, 0], np.int32), np.array([7, 0], np.int32)],
    )
    rows = _packed(tasks, 16)
    trained = rows.weights > 0
    assert sorted(rows.targets[trained].tolist()) == [0, 0, 5, 6, 7]
    assert set(np.unique(rows.weights)) == {0.0, 1.0}


def test_everything_left_out_is_told():
    counts = {"duplicates": 1, "skipped": 2, "not_chosen": 3, "task_duplicates": 4, "task_bad_lines": 5}
    counts |= {"task_empty": 6, "dropped_empty_prompts": 7, "dropped_long_prompts": 8, "dropped_long_completions": 9}
    said = _left_out(counts | {"task_pairs": 100, "files": 50})
    assert [int(part.split()[0]) for part in said.split(", ")] == [1, 2, 3, 4, 5, 6, 7, 8, 9]
    assert _left_out({"files": 3, "duplicates": 0}) == ""
