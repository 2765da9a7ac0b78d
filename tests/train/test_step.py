"""The update step: denominators, accumulation, roles, donation, types."""

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import tiny

from tlt_jax.config.stage_sections import OptimizerConfig
from tlt_jax.models.declare import flatten, shardings
from tlt_jax.models.heads import ShallowExit, exit_logits
from tlt_jax.models.transformer import Transformer, hidden_states, logits
from tlt_jax.train.distillation import exit_distillation
from tlt_jax.train.losses import cross_entropy, next_token_objective, weighted_sum
from tlt_jax.train.state import Role, new_state, opt_shardings, state_shardings
from tlt_jax.train.step import Objective, make_update, normalised

ROWS, LENGTH, STRIDE = 4, 8, 4
FLOAT = jnp.float32
# No clipping, and a first moment that is linear in the gradient: (1 - beta1) * g. At progress 0 the rate is 0.
LINEAR = OptimizerConfig(learning_rate=1e-3, clip_norm=1e9, warmup_fraction=1.0)


def policy(declare):
    return Transformer(tiny.SHAPE, declare)


def drafter(declare):
    return ShallowExit(tiny.SHAPE, declare)


ROLES = {"policy": Role(policy, LINEAR), "exit": Role(drafter, LINEAR)}


def placed(roles, params):
    """The parameters where the update wants them, so that it is compiled once."""
    return {name: jax.device_put(params[name], shardings(role.build, tiny.mesh())) for name, role in roles.items()}


def fresh():
    return new_state(ROLES, placed(ROLES, params()), tiny.mesh())


def batch(microbatches: int = 1) -> dict[str, jax.Array]:
    """Four rows with very uneven masks: all, one token, none, half."""
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 50, (ROWS, LENGTH + 1))
    weights = np.zeros((ROWS, LENGTH), np.float32)
    weights[0], weights[1, 5], weights[3, ::2] = 1, 1, 1
    made = {
        "tokens": tokens[:, :-1],
        "targets": tokens[:, 1:],
        "segments": np.ones((ROWS, LENGTH), np.int32),
        "positions": np.tile(np.arange(LENGTH), (ROWS, 1)),
        "weights": weights,
    }
    return {
        name: jnp.asarray(a if a.dtype == np.float32 else a.astype(np.int32)).reshape(microbatches, -1, LENGTH)
        for name, a in made.items()
    }


@cache
def objective(remat: str = "none", dtype: str = "float32") -> Objective:
    return next_token_objective(dtype=jnp.dtype(dtype), remat=remat, exit_weight=0.5, exit_stride=STRIDE)


@cache
def update():
    return make_update(objective(), ROLES, tiny.mesh())


@cache
def reference() -> tuple[np.ndarray, np.ndarray]:
    """Cross-entropy of each token, [rows, length], at the last layer and at the exit, by the forward pass."""
    model, exit = tiny.transformer(scale=2.0), tiny.shallow_exit()
    b = {name: a[0] for name, a in batch().items()}
    x_exit, x = hidden_states(model, b["tokens"], b["segments"], b["positions"], dtype=FLOAT)
    found = (
        jax.nn.log_softmax(np.asarray(out, np.float64)) for out in (logits(model, x), exit_logits(model, exit, x_exit))
    )
    return tuple(
        -np.take_along_axis(np.asarray(out), np.asarray(b["targets"])[..., None], axis=-1)[..., 0] for out in found
    )


@cache
def after_one_step(microbatches: int):
    """The gradients, as first moments by path, and the metrics."""
    state, metrics = update()(fresh(), batch(microbatches), np.float32(0.0))
    moments = {path: np.asarray(a) for path, a in flatten(state.opt).items() if "/mu/" in path}
    assert len(moments) == len(flatten(state.params))
    return moments, {name: float(value) for name, value in metrics.items()}


def test_cross_entropy_by_hand():
    # softmax of (log 1, log 2, log 5) is (1/8, 2/8, 5/8)
    rows = jnp.log(jnp.asarray([[[1.0, 2.0, 5.0]] * 3]))
    np.testing.assert_allclose(
        cross_entropy(rows, jnp.asarray([[0, 1, 2]])), [[np.log(8), np.log(4), np.log(1.6)]], atol=1e-6
    )


def test_normalised_weights():
    np.testing.assert_allclose(normalised(jnp.asarray([[1.0, 0.0], [1.0, 2.0]])), [[0.25, 0.0], [0.25, 0.5]])
    np.testing.assert_array_equal(normalised(jnp.zeros((2, 2))), np.zeros((2, 2)))


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_has_weight_zero_reaches_neither_loss_nor_gradient(bad):
    values, weights = jnp.asarray([bad, 3.0, bad]), jnp.asarray([0.0, 0.5, 0.0])
    loss, gradient = jax.value_and_grad(weighted_sum)(values, weights)
    assert float(loss) == 1.5
    np.testing.assert_array_equal(gradient, [0.0, 0.5, 0.0])


@pytest.mark.parametrize("microbatches", [1, 4])
def test_losses_are_means_over_the_tokens_of_the_whole_update(microbatches):
    main, early = reference()
    weights = np.asarray(batch()["weights"][0])
    at_exit = weights * (np.arange(LENGTH) % STRIDE == 0)
    _, metrics = after_one_step(microbatches)
    assert weights.sum() == 13
    assert metrics["train/main_loss"] == pytest.approx((main * weights).sum() / 13, abs=2e-6)
    assert metrics["train/exit_loss"] == pytest.approx((early * at_exit).sum() / at_exit.sum(), abs=2e-6)
    assert metrics["train/loss"] == pytest.approx(
        metrics["train/main_loss"] + 0.5 * metrics["train/exit_loss"], abs=2e-6
    )


def test_accumulated_gradients_are_those_of_the_full_batch():
    """Of the four microbatches one is masked altogether."""
    whole, metrics = after_one_step(1)
    parts, metrics_of_parts = after_one_step(4)
    assert metrics_of_parts == pytest.approx(metrics, rel=2e-6, abs=2e-6)
    for path, moment in parts.items():
        np.testing.assert_allclose(moment, whole[path], atol=1e-5 * np.abs(whole[path]).max() + 1e-9, err_msg=path)
        assert np.isfinite(moment).all(), path


@pytest.mark.parametrize("microbatches", [1, 4])
def test_an_update_whose_every_token_is_masked_changes_nothing(microbatches):
    empty = batch(microbatches) | {"weights": jnp.zeros_like(batch(microbatches)["weights"])}
    before = {path: np.array(a) for path, a in flatten(fresh().params).items()}
    state, metrics = update()(fresh(), empty, np.float32(1.0))
    assert float(metrics["train/lr"]) == pytest.approx(1e-3)
    assert float(metrics["train/loss"]) == float(metrics["train/grad_norm"]) == 0.0
    for path, after in flatten(state.params).items():
        np.testing.assert_array_equal(after, before[path], err_msg=path)


def test_the_exit_looks_at_every_position_in_turn():
    """At rate 0 each step sees the same model; its exit's loss is over every fourth position, from step % 4."""
    main, early = reference()
    state = fresh()
    ones = batch() | {"weights": jnp.ones((1, ROWS, LENGTH))}
    for step in range(STRIDE + 1):
        state, metrics = update()(state, ones, np.float32(0.0))
        assert float(metrics["train/exit_loss"]) == pytest.approx(early[:, step % STRIDE :: STRIDE].mean(), abs=2e-6)
        assert float(metrics["train/main_loss"]) == pytest.approx(main.mean(), abs=2e-6)


TOY_ROLES = {
    "policy": Role(drafter, OptimizerConfig(clip_norm=1.0)),
    "exit": Role(drafter, OptimizerConfig(clip_norm=1.0)),
}


def toy_state():
    params = {"policy": tiny.shallow_exit(), "exit": tiny.shallow_exit(seed=2)}
    return new_state(TOY_ROLES, placed(TOY_ROLES, params), tiny.mesh())


def toy_objective():
    """The roles' own squares, the exit's times `scale`; and metrics of one number a microbatch."""

    def loss(params, b):
        squares = {name: sum(jnp.sum(a * a) for a in jax.tree.leaves(module)) for name, module in params.items()}
        value = b["value"][0]
        return squares["policy"] + b["scale"][0] * squares["exit"], {
            "value": value,
            "value_max": value,
            "each/value": b["value"],
        }

    return Objective(lambda batch, step: batch, loss)


@cache
def toy_update():
    return make_update(toy_objective(), TOY_ROLES, tiny.mesh())


def toy_batch(scale: float = 1.0, values=(3.0,)) -> dict[str, jax.Array]:
    return {"scale": jnp.full((len(values), 1), scale), "value": jnp.asarray(values)[:, None]}


def test_a_huge_exit_gradient_leaves_the_policys_update_alone():
    small, _ = toy_update()(toy_state(), toy_batch(1.0), np.float32(0.5))
    huge, _ = toy_update()(toy_state(), toy_batch(1e8), np.float32(0.5))
    for path, after in flatten(huge.params["policy"]).items():
        np.testing.assert_array_equal(after, flatten(small.params["policy"])[path], err_msg=path)
    assert not np.array_equal(huge.params["policy"].down, toy_state().params["policy"].down)


@pytest.mark.parametrize("values", [(3.0, 5.0, 4.0), (-3.0, -5.0, -4.0)])
def test_metrics_add_up_over_microbatches_but_those_in_max(values):
    _, metrics = toy_update()(toy_state(), toy_batch(values=values), np.float32(0.5))
    assert float(metrics["value"]) == sum(values)
    assert float(metrics["value_max"]) == max(values)
    np.testing.assert_array_equal(metrics["each/value"][:, 0], values)


def test_a_dry_update_tells_the_same_and_leaves_the_state():
    update = toy_update()
    dry, told = update(toy_state(), toy_batch(), np.float32(0.5), None, np.bool_(True))
    jax.tree.map(np.testing.assert_array_equal, dry, toy_state())
    wet, same = update(dry, toy_batch(), np.float32(0.5), None, np.bool_(False))
    jax.tree.map(np.testing.assert_array_equal, told, same)
    plain, _ = update(toy_state(), toy_batch(), np.float32(0.5))
    jax.tree.map(np.testing.assert_array_equal, wet, plain)


def test_the_gradient_norm_is_the_policys_before_clipping():
    _, metrics = toy_update()(toy_state(), toy_batch(1e8), np.float32(0.5))
    norm = np.sqrt(
        sum(np.sum(np.square(2.0 * np.asarray(a, np.float64))) for a in jax.tree.leaves(tiny.shallow_exit()))
    )
    assert float(metrics["train/grad_norm"]) == pytest.approx(norm, rel=1e-6)


def test_the_state_is_donated():
    state = toy_state()
    new, _ = toy_update()(state, toy_batch(), np.float32(0.5))
    jax.block_until_ready(new)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves((state.params, state.opt)))


def test_a_new_state_is_a_copy():
    params = {"policy": tiny.shallow_exit(), "exit": tiny.shallow_exit(seed=2)}
    toy_update()(new_state(TOY_ROLES, params, tiny.mesh()), toy_batch(), np.float32(0.5))
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(params))


def test_shardings_have_the_states_structure():
    state = fresh()
    assert jax.tree.structure(state_shardings(ROLES, tiny.mesh())) == jax.tree.structure(state)
    assert jax.tree.structure(opt_shardings(ROLES["exit"], tiny.mesh())) == jax.tree.structure(state.opt["exit"])


def loss_of(params, remat: str = "none", dtype: str = "float32"):
    made = objective(remat, dtype)
    return made.loss(params, {name: a[0] for name, a in made.prepare(batch(), jnp.int32(0)).items()})[0]


def params():
    return {"policy": tiny.transformer(scale=2.0), "exit": tiny.shallow_exit()}


@pytest.mark.parametrize("remat", ["dots", "full"])
def test_remat_changes_no_loss_and_no_gradient(remat):
    loss, found = jax.jit(jax.value_and_grad(partial(loss_of, remat=remat)))(params())
    moments, metrics = after_one_step(1)
    assert float(loss) == pytest.approx(metrics["train/loss"], abs=1e-6)
    for path, gradient in flatten(found).items():
        role, _, rest = path.partition("/")
        (plain,) = (10.0 * m for p, m in moments.items() if p.startswith(role + "/") and p.endswith("/mu/" + rest))
        np.testing.assert_allclose(gradient, plain, atol=1e-5 * np.abs(plain).max() + 1e-9, err_msg=path)


def test_bfloat16_compute_keeps_float32_weights_gradients_and_loss():
    loss, gradients = jax.eval_shape(jax.value_and_grad(partial(loss_of, dtype="bfloat16")), params())
    assert loss.dtype == jnp.float32
    assert {leaf.dtype for leaf in jax.tree.leaves(gradients)} == {jnp.dtype("float32")}
    # bfloat16 has 8 bits: near the float32 loss, and not equal to it.
    difference = abs(float(jax.jit(partial(loss_of, dtype="bfloat16"))(params())) - after_one_step(1)[1]["train/loss"])
    assert 1e-7 < difference < 0.1


def distil(policy, exit, temperature: float = 0.7):
    b = {name: a[0] for name, a in batch().items()}
    x_exit, x = hidden_states(policy, b["tokens"], b["segments"], b["positions"], dtype=FLOAT)
    log_probs = jax.nn.log_softmax(logits(policy, x) / temperature, axis=-1)
    return exit_distillation(policy, exit, x_exit, log_probs, temperature, normalised(b["weights"]))


def test_distillation_sends_no_gradient_to_the_policy():
    of_policy, of_exit = jax.jit(jax.grad(lambda p, e: distil(p, e)[0], argnums=(0, 1)))(
        tiny.transformer(), tiny.shallow_exit()
    )
    for path, gradient in flatten(of_policy).items():
        np.testing.assert_array_equal(gradient, 0.0, err_msg=path)
    for path, gradient in flatten(of_exit).items():
        assert float(jnp.abs(gradient).max()) > 0, path


@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_distillation_of_a_perfect_drafter_costs_the_entropy_and_accepts_everything(temperature):
    model, exit = tiny.perfect_pair(scale=2.0)
    loss, acceptance = jax.jit(partial(distil, temperature=temperature))(model, exit)
    b = {name: a[0] for name, a in batch().items()}
    probs = np.exp(np.asarray(jax.nn.log_softmax(tiny.plain_logits(model, b["tokens"]) / temperature), np.float64))
    entropy = -(probs * np.log(probs)).sum(-1)
    weights = np.asarray(b["weights"])
    assert float(loss) == pytest.approx((entropy * weights).sum() / weights.sum(), abs=1e-5)
    assert float(acceptance) == pytest.approx(1.0, abs=1e-5)


def test_distillation_of_another_drafter_costs_more_and_accepts_less():
    loss, acceptance = jax.jit(distil)(*(tiny.perfect_pair(scale=2.0)[0], tiny.shallow_exit(scale=2.0)))
    best, _ = jax.jit(distil)(*tiny.perfect_pair(scale=2.0))
    assert float(loss) > float(best) + 1e-3
    assert 0.0 < float(acceptance) < 0.999


@cache
def guarded():
    """A loss of one number, whose gradient the batch chooses: what is skipped can be counted by hand."""
    objective = Objective(
        lambda batch, step: batch,
        lambda params, b: (jnp.sum(params["policy"].final_norm) * jnp.sum(b["slope"]) + jnp.sum(b["offset"]), {}),
    )
    adam = OptimizerConfig(learning_rate=1e-3, clip_norm=1e9, warmup_fraction=0.0)
    roles = {"policy": Role(policy, adam)}
    start = new_state(roles, placed(roles, {"policy": tiny.transformer()}), tiny.mesh())
    return make_update(objective, roles, tiny.mesh(), spike_factor=10.0), start


def bits(state) -> dict[str, bytes]:
    return {path: np.asarray(a).tobytes() for path, a in flatten((state.params, state.opt)).items()}


def push(state, slope=1.0, offset=0.0):
    """(the state after an update whose gradient is `slope` in each of 16 places, its metrics)."""
    made = {"slope": jnp.full((1, 1), slope), "offset": jnp.full((1, 1), offset)}
    return guarded()[0](state, made, np.float32(0.5))


def started(slope=1.0):
    state, metrics = push(jax.tree.map(jnp.copy, guarded()[1]), slope)
    assert float(metrics["train/skipped"]) == 0.0
    return state


@pytest.mark.parametrize("fault", [{"slope": np.nan}, {"slope": np.inf}, {"offset": np.nan}, {"slope": 11.0}])
def test_an_update_that_is_not_finite_or_a_spike_changes_nothing_and_is_counted(fault):
    once = started()
    assert float(once.usual_norm) == pytest.approx(4.0)
    before = bits(once)
    skipped, metrics = push(once, **fault)
    assert float(metrics["train/skipped"]) == 1.0
    assert bits(skipped) == before  # the optimiser's count stands still too
    assert int(skipped.step) == 2
    assert float(skipped.usual_norm) == pytest.approx(4.0)
    after, metrics = push(skipped, slope=9.0)
    assert float(metrics["train/skipped"]) == 0.0
    assert bits(after) != before
    assert float(after.usual_norm) == pytest.approx(0.95 * 4.0 + 0.05 * 36.0)


def test_updates_without_a_gradient_hardly_change_what_is_usual():
    """A batch of equal rewards has none; after a hundred of them an ordinary gradient was a spike."""
    state = started()
    for slope in [0.0, 0.01] * 50:
        state, metrics = push(state, slope)
        assert float(metrics["train/skipped"]) == 0.0
    usual = 4.0 * 0.999**100
    assert float(state.usual_norm) == pytest.approx(usual, rel=1e-4)
    state, _ = push(state, 0.5)
    assert float(state.usual_norm) == pytest.approx(0.95 * usual + 0.05 * 2.0, rel=1e-4)


def test_after_a_first_norm_that_was_far_too_large_what_is_usual_comes_down():
    state = started(100.0)
    for _ in range(2500):
        state, _ = push(state, 1.0)
    assert float(state.usual_norm) == pytest.approx(4.0, rel=0.01)


@pytest.mark.parametrize("slope", [0.0, 1e-6])
def test_a_phase_that_begins_without_a_gradient_takes_the_first_that_comes(slope):
    state = started(slope)
    assert float(state.usual_norm) == 0.0
    state, metrics = push(state, 5.0)
    assert float(metrics["train/skipped"]) == 0.0
    assert float(state.usual_norm) == pytest.approx(20.0)


def test_spikes_that_last_stay_spikes():
    """So that the phase goes back to a checkpoint."""
    state = started()
    for _ in range(20):
        state, metrics = push(state, 20.0)
        assert float(metrics["train/skipped"]) == 1.0
