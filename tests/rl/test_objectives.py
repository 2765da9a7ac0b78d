"""What the reinforcement-learning phases minimise, on a tiny model."""

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import tiny

from tlt_jax.models.declare import flatten
from tlt_jax.models.heads import ScalarHead
from tlt_jax.rl.objectives import (
    PolicyTerms,
    policy_objective,
    reward_objective,
    sequence_log_probs,
    sequence_rewards,
    sequence_values,
)
from tlt_jax.train.distillation import DrafterTerms, distillation_objective
from tlt_jax.train.eagle_loss import Chains

ROWS, LENGTH, TEMPERATURE = 4, 9, 0.7
FLOAT = jnp.float32
MODEL, EXIT = tiny.transformer(scale=2.0), tiny.shallow_exit()
HEAD = tiny.random_module(lambda d: ScalarHead(tiny.SHAPE, d), 3)
LENGTHS = np.array([9, 5, 7, 2])


@cache
def tokens() -> jax.Array:
    drawn = np.random.default_rng(0).integers(0, 50, (ROWS, LENGTH))
    return jnp.asarray(np.where(np.arange(LENGTH) < LENGTHS[:, None], drawn, 0), jnp.int32)


def inside() -> np.ndarray:
    return (np.arange(LENGTH) < LENGTHS[:, None]).astype(np.int32)


@cache
def log_probs(temperature: float) -> jax.Array:
    scored = jax.jit(partial(sequence_log_probs, temperature=temperature, dtype=FLOAT))
    return scored(MODEL, tokens(), jnp.asarray(inside()))


@cache
def reference(temperature: float) -> np.ndarray:
    """log p(token t | before), [B, T], by the plain forward pass."""
    log_probs_BTV = jax.nn.log_softmax(jax.jit(tiny.plain_logits)(MODEL, tokens()) / temperature, axis=-1)
    picked = jnp.take_along_axis(log_probs_BTV[:, :-1], tokens()[:, 1:, None], axis=-1)[..., 0]
    return np.pad(np.asarray(picked), ((0, 0), (1, 0)))


def batch(**more) -> dict[str, jax.Array]:
    """One microbatch. The first two tokens of each row are its prompt."""
    weights = inside() * (np.arange(LENGTH) >= 2)
    advantages = np.random.default_rng(1).normal(size=(ROWS, LENGTH)).astype(np.float32) * weights
    made = {
        "tokens": tokens(),
        "segments": inside(),
        "positions": np.tile(np.arange(LENGTH, dtype=np.int32), (ROWS, 1)),
        "weights": weights.astype(np.float32),
        "advantages": advantages,
        "old_logp": log_probs(TEMPERATURE) * weights,
        **more,
    }
    return {name: jnp.asarray(value)[None] for name, value in made.items()}


TERMS = PolicyTerms(clip_low=0.2, clip_high=0.2, drafters=DrafterTerms(TEMPERATURE, 0.0), entropy_coef=0.0)


@cache
def compiled(terms: PolicyTerms, gradient: bool):
    objective = policy_objective(terms, dtype=FLOAT, remat="none")

    def loss(params, made):
        prepared = objective.prepare(made, jnp.int32(0))
        return objective.loss(params, {name: value[0] for name, value in prepared.items()})

    return jax.jit(jax.value_and_grad(loss, has_aux=True) if gradient else loss)


def value_and_gradient(terms: PolicyTerms, made, params=None):
    return compiled(terms, True)(params or {"policy": MODEL}, made)


def value(terms: PolicyTerms, made, params=None):
    return compiled(terms, False)(params or {"policy": MODEL}, made)


@cache
def plain_result():
    return value_and_gradient(TERMS, batch())


@pytest.mark.parametrize("temperature", [1.0, TEMPERATURE])
def test_log_probs_divide_the_logits_by_the_temperature(temperature):
    np.testing.assert_allclose(log_probs(temperature) * inside(), reference(temperature) * inside(), atol=2e-6)
    np.testing.assert_array_equal(log_probs(temperature)[:, 0], 0.0)


def test_at_step_zero_the_ratio_is_one():
    (_, metrics), _ = plain_result()
    # Two programs: the same numbers to rounding. Nothing is clipped and the estimate of the KL is 0.
    assert float(metrics["rl/logp_diff_max"]) < 2e-6
    assert float(metrics["rl/clip_fraction_low"]) == float(metrics["rl/clip_fraction_high"]) == 0.0
    assert abs(float(metrics["rl/approx_kl"])) < 1e-6


def test_at_step_zero_the_gradient_is_reinforces():
    (loss, metrics), gradient = plain_result()
    made = {name: value[0] for name, value in batch().items()}
    weights = made["weights"] / made["weights"].sum()

    def reinforce(model):
        logp = sequence_log_probs(model, made["tokens"], made["segments"], temperature=TEMPERATURE, dtype=FLOAT)
        return -jnp.sum(weights * made["advantages"] * logp)

    expected = flatten(jax.jit(jax.grad(reinforce))(MODEL))
    for path, found in flatten(gradient["policy"]).items():
        np.testing.assert_allclose(
            found, expected[path], atol=1e-5 * float(jnp.abs(expected[path]).max()) + 1e-7, err_msg=path
        )
    # With ratio 1 the loss is minus the mean advantage.
    assert float(loss) == pytest.approx(-float(jnp.sum(weights * made["advantages"])), abs=1e-6)
    assert float(metrics["rl/policy_loss"]) == float(loss)


def test_values_never_see_the_temperature():
    more = {"old_values": np.zeros((ROWS, LENGTH), np.float32), "returns": np.ones((ROWS, LENGTH), np.float32)}
    losses = []
    for temperature in (0.5, 2.0):
        terms = TERMS._replace(drafters=DrafterTerms(temperature, 0.0), value_coef=0.5)
        _, metrics = value(terms, batch(**more), {"policy": MODEL, "value": HEAD})
        losses.append(float(metrics["rl/value_loss"]))
    assert losses[0] == losses[1]
    # V_old 0, R 1, range 0.2: 1/2 max((V - 1)^2, (clip(V, -0.2, 0.2) - 1)^2), by hand on the values themselves.
    values = np.asarray(sequence_values(MODEL, HEAD, tokens(), jnp.asarray(inside()), dtype=FLOAT))
    each = 0.5 * np.maximum((values - 1) ** 2, (np.clip(values, -0.2, 0.2) - 1) ** 2)
    weights = np.asarray(batch()["weights"][0])
    assert losses[0] == pytest.approx(float((each * weights).sum() / weights.sum()), rel=1e-5)


def test_kl_and_entropy_enter_with_their_weights():
    (plain, before), _ = plain_result()
    ref = np.asarray(log_probs(TEMPERATURE)) - 0.3  # d = 0.3 at every token: k2 = 0.045
    total, _ = value(TERMS._replace(kl_coef=2.0, entropy_coef=0.5), batch(ref_logp=ref))
    assert float(total) == pytest.approx(float(plain) + 2.0 * 0.045 - 0.5 * float(before["rl/entropy"]), abs=1e-5)


def test_nothing_under_weight_zero_reaches_loss_or_gradient():
    """What stands on prompts and padding may be anything, NaN and infinities included."""
    outside = np.asarray(batch()["weights"][0]) == 0
    rubbish = {name: np.where(outside, np.nan, np.asarray(batch()[name][0])) for name in ("advantages", "old_logp")}
    (loss, metrics), gradient = value_and_gradient(TERMS, batch(**rubbish))
    (expected, _), expected_gradient = plain_result()
    assert float(loss) == float(expected)
    assert all(np.isfinite(float(value)) for value in metrics.values())
    for path, found in flatten(gradient["policy"]).items():
        np.testing.assert_allclose(found, flatten(expected_gradient["policy"])[path], atol=1e-6, err_msg=path)


def test_packed_sequences_give_the_loss_and_gradient_of_unpacked_ones():
    """Rows 1 and 2 (5 and 7 tokens) share a row, and rows 0 and 3 (9 and 2): the same update."""
    rows = {name: np.asarray(array[0]) for name, array in batch().items()}
    packed = {name: np.zeros((2, 12), array.dtype) for name, array in rows.items()}
    for where, parts in enumerate(([1, 2], [0, 3])):
        start = 0
        for number, row in enumerate(parts, start=1):
            place = slice(start, start + LENGTHS[row])
            for name, array in rows.items():
                packed[name][where, place] = number if name == "segments" else array[row, : LENGTHS[row]]
            start += LENGTHS[row]
    (loss, metrics), gradient = value_and_gradient(
        TERMS, {name: jnp.asarray(array)[None] for name, array in packed.items()}
    )
    (expected, expected_metrics), expected_gradient = plain_result()
    assert float(loss) == pytest.approx(float(expected), abs=2e-6)
    assert float(metrics["rl/entropy"]) == pytest.approx(float(expected_metrics["rl/entropy"]), abs=5e-6)
    for path, found in flatten(gradient["policy"]).items():
        wanted = np.asarray(flatten(expected_gradient["policy"])[path])
        np.testing.assert_allclose(found, wanted, atol=1e-5 * np.abs(wanted).max() + 1e-7, err_msg=path)


def test_the_drafters_loss_leaves_the_policys_gradient_alone():
    terms = TERMS._replace(drafters=DrafterTerms(TEMPERATURE, 10.0))
    _, gradient = value_and_gradient(terms, batch(), {"policy": MODEL, "exit": EXIT})
    _, expected = plain_result()
    for path, found in flatten(gradient["policy"]).items():
        np.testing.assert_allclose(found, flatten(expected["policy"])[path], atol=1e-6, err_msg=path)
    assert float(jnp.abs(gradient["exit"].down).max()) > 1e-4


def test_an_eagles_loss_leaves_the_policys_gradient_alone():
    eagle, terms = tiny.eagle(), TERMS._replace(drafters=DrafterTerms(TEMPERATURE, 0.0, Chains(drafts=2, stride=1)))
    (loss, metrics), gradient = value_and_gradient(terms, batch(), {"policy": MODEL, "eagle": eagle})
    (plain, _), expected = plain_result()
    for path, found in flatten(gradient["policy"]).items():
        np.testing.assert_allclose(found, flatten(expected["policy"])[path], atol=1e-6, err_msg=path)
    assert all(float(jnp.abs(a).max()) > 0 for a in jax.tree.leaves(gradient["eagle"]))
    assert 0 < float(metrics["train/eagle_acceptance"]) < 1
    assert float(loss) == pytest.approx(float(plain) + float(metrics["train/eagle_loss"]), abs=1e-6)


def test_distillation_is_the_drafters_part_of_a_policy_update():
    terms = DrafterTerms(TEMPERATURE, 1.0, Chains(drafts=2, stride=1))
    params = {"policy": MODEL, "exit": EXIT, "eagle": tiny.eagle()}
    made = batch() | {"sampled": batch()["weights"].at[0, 1].set(0.0)}
    made["old_logp"] = made["old_logp"].at[0, 0].add(0.5).at[0, 1].add(0.7)  # the latter, greedy, is not compared
    objective = distillation_objective(terms, dtype=FLOAT)
    prepared = {name: value[0] for name, value in objective.prepare(made, jnp.int32(0)).items()}
    loss, metrics = jax.jit(objective.loss)(params, prepared)
    _, expected = value(TERMS._replace(drafters=terms), batch(), params)
    for name in ("train/exit_loss", "train/exit_acceptance", "train/eagle_loss", "train/eagle_acceptance"):
        assert float(metrics[name]) == pytest.approx(float(expected[name]), abs=1e-6), name
    assert float(loss) == pytest.approx(float(metrics["train/exit_loss"] + metrics["train/eagle_loss"]), abs=1e-6)
    assert float(metrics["rl/logp_diff_max"]) == pytest.approx(0.5, abs=1e-5)


REWARDS = jax.jit(partial(sequence_rewards, dtype=FLOAT))


def test_the_reward_is_read_at_the_last_real_token():
    # By hand: the value that would choose the token after position length - 1.
    longer = jnp.pad(tokens(), ((0, 0), (0, 1)))
    values = np.asarray(sequence_values(MODEL, HEAD, longer, jnp.ones_like(longer), dtype=FLOAT))
    expected = values[np.arange(ROWS), LENGTHS]
    np.testing.assert_allclose(REWARDS(MODEL, HEAD, tokens(), jnp.asarray(LENGTHS)), expected, atol=1e-5)
    assert np.ptp(expected) > 0.1


@pytest.mark.parametrize("padding", [0, 49])
def test_padding_does_not_change_the_reward(padding):
    real = inside() > 0
    padded = jnp.pad(jnp.where(real, tokens(), padding), ((0, 0), (0, 4)), constant_values=padding)
    found = REWARDS(MODEL, HEAD, padded, jnp.asarray(LENGTHS))
    np.testing.assert_allclose(found, REWARDS(MODEL, HEAD, tokens(), jnp.asarray(LENGTHS)), atol=1e-5)
    alone = REWARDS(MODEL, HEAD, padded[1:2, :5], jnp.asarray([5]))
    np.testing.assert_allclose(found[1], alone[0], atol=1e-5)


def test_the_reward_models_loss_by_hand():
    objective = reward_objective(dtype=FLOAT, remat="none")
    made = {
        "chosen": tokens()[:2],
        "rejected": tokens()[2:],
        "chosen_length": LENGTHS[:2],
        "rejected_length": LENGTHS[2:],
        "weights": np.array([1.0, 1.0], np.float32),
    }
    prepared = objective.prepare({name: jnp.asarray(value)[None] for name, value in made.items()}, jnp.int32(0))
    loss, metrics = jax.jit(objective.loss)(
        {"reward_trunk": MODEL, "reward": HEAD}, {name: value[0] for name, value in prepared.items()}
    )
    scores = np.asarray(REWARDS(MODEL, HEAD, tokens(), jnp.asarray(LENGTHS)), np.float64)
    difference = scores[:2] - scores[2:]
    assert float(loss) == pytest.approx(np.mean(np.log1p(np.exp(-difference))), abs=1e-5)
    assert float(metrics["train/pair_accuracy"]) == pytest.approx(np.mean(difference > 0), abs=1e-6)
