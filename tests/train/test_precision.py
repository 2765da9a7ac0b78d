"""Number types of a training step: what is cast at each level, and dynamic loss scaling."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from pydantic import ValidationError
from support import tiny

from tlt_jax.config.device_sections import DeviceConfig
from tlt_jax.config.stage_sections import OptimizerConfig
from tlt_jax.models.declare import flatten, shardings, table
from tlt_jax.models.heads import ShallowExit
from tlt_jax.models.transformer import Transformer
from tlt_jax.parallel.sharding import replicated
from tlt_jax.train.losses import next_token_objective
from tlt_jax.train.precision import Precision, compute_weights, precision_of
from tlt_jax.train.state import Role, abstract_state, new_state, state_shardings
from tlt_jax.train.step import Objective, make_update

F16, BF16 = Precision(jnp.dtype("float16")), Precision(jnp.dtype("bfloat16"))
O2 = Precision(jnp.dtype("bfloat16"), half_weights=True)
ADAM = OptimizerConfig(learning_rate=1e-2, clip_norm=1e9, warmup_fraction=0.0)
ROLES = {"exit": Role(lambda declare: ShallowExit(tiny.SHAPE, declare), ADAM)}


@pytest.mark.parametrize(
    ("level", "dtype", "expected"),
    [
        ("auto", "auto", Precision(jnp.dtype("float32"))),  # on a CPU
        ("O0", "auto", Precision(jnp.dtype("float32"))),
        ("O0", "float32", Precision(jnp.dtype("float32"))),
        ("O1", "auto", BF16),
        ("O1", "float16", F16),
        ("auto", "float16", F16),
        ("O2", "auto", O2),
        ("O2", "float16", Precision(jnp.dtype("float16"), half_weights=True)),
    ],
)
def test_what_the_config_asks_for(level, dtype, expected):
    assert precision_of(DeviceConfig(precision=level, compute_dtype=dtype)) == expected
    assert expected.scaled == (expected.dtype == jnp.float16)


@pytest.mark.parametrize(
    ("level", "dtype"), [("O0", "bfloat16"), ("O0", "float16"), ("O1", "float32"), ("O2", "float32")]
)
def test_levels_and_types_that_contradict_each_other_are_refused(level, dtype):
    with pytest.raises(ValidationError, match=rf"compute_dtype \({dtype}\) does not fit precision {level}"):
        DeviceConfig(precision=level, compute_dtype=dtype)


def test_at_level_2_the_loss_sees_matrices_in_the_compute_type_and_the_rest_in_float32():
    model = tiny.transformer()
    specs = table(lambda declare: Transformer(tiny.SHAPE, declare))
    assert compute_weights(model, specs, BF16) is model
    seen = {path: array.dtype for path, array in flatten(compute_weights(model, specs, O2)).items()}
    norms = {"final_norm", "layers/attention_norm", "layers/mlp_norm"}
    assert {path for path, dtype in seen.items() if dtype == jnp.float32} == norms
    assert {dtype for path, dtype in seen.items() if path not in norms} == {jnp.dtype("bfloat16")}


def test_float32_masters_take_steps_that_the_compute_type_cannot():
    """1e-5 of 1: bfloat16 has 8 bits, so that weights held in it alone would never move."""
    ones = {"exit": tiny.random_module(ROLES["exit"].build, 0)}
    ones = jax.tree.map(jnp.ones_like, ones)
    slow = {"exit": Role(ROLES["exit"].build, ADAM.model_copy(update={"learning_rate": 1e-5}))}
    objective = Objective(
        lambda batch, step: batch,
        lambda params, b: (jnp.sum(params["exit"].down.astype(jnp.float32)) * b["slope"][0], {}),
    )
    update = make_update(objective, slow, tiny.mesh(), precision=O2)
    state = new_state(slow, ones, tiny.mesh(), O2)
    for _ in range(10):
        state, _ = update(state, {"slope": jnp.ones((1, 1))}, np.float32(0.0))
    assert state.params["exit"].down.dtype == jnp.float32
    np.testing.assert_allclose(state.params["exit"].down, 1.0 - 10e-5, atol=1e-6)


@cache
def squares():
    """exit.down.sum() in the compute type, times a number of the batch's: gradients that overflow can be chosen."""
    objective = Objective(
        lambda batch, step: batch,
        lambda params, b: (
            jnp.sum(params["exit"].down.astype(jnp.float16) * b["slope"][0].astype(jnp.float16)).astype(jnp.float32),
            {},
        ),
    )
    return make_update(objective, ROLES, tiny.mesh(), precision=F16)


def start(scale: float = 2.0**15, fin_steps: int = 0):
    state = new_state(ROLES, {"exit": tiny.shallow_exit()}, tiny.mesh(), F16)
    assert float(state.loss_scale.scale) == 2.0**16
    return type(state)(
        state.step,
        state.params,
        state.opt,
        state.usual_norm,
        state.loss_scale.replace(scale=jnp.float32(scale), fin_steps=jnp.int32(fin_steps)),
    )


def step(state, *slopes: float):
    state, metrics = squares()(state, {"slope": jnp.asarray(slopes, jnp.float32)[:, None]}, np.float32(0.0))
    return state, {name: float(value) for name, value in metrics.items()}


def bits(tree) -> dict[str, bytes]:
    return {path: np.asarray(array).tobytes() for path, array in flatten(tree).items()}


def test_a_scaled_gradient_is_the_gradient():
    scaled, metrics = step(start(), 0.5)
    assert metrics["train/overflow"] == metrics["train/skipped"] == 0.0
    assert metrics["train/loss_scale"] == 2.0**15
    assert metrics["train/grad_norm"] == pytest.approx(0.5 * np.sqrt(16 * 4))
    assert float(scaled.loss_scale.scale) == 2.0**15
    assert int(scaled.loss_scale.fin_steps) == 1


def test_a_gradient_that_the_scale_makes_vanish_without_it_arrives():
    """2^-24 is float16's smallest; scaled by 2^15, 2^-26 is far above it."""
    _, metrics = step(start(), 2.0**-24)
    assert metrics["train/grad_norm"] == pytest.approx(2.0**-24 * np.sqrt(16 * 4))


@pytest.mark.parametrize("slopes", [(4.0,), (0.5, 4.0, 0.5), (4.0, 0.5), (4.0, 4.0)])
def test_an_overflow_skips_the_step_halves_the_scale_once_and_is_counted(slopes):
    """4 * 2^15 is beyond float16; one microbatch suffices. What was not the optimiser's fault it does not count."""
    state = start()
    before = bits((state.params, state.opt, state.usual_norm))
    after, metrics = step(state, *slopes)
    assert metrics["train/overflow"] == 1.0
    assert metrics["train/skipped"] == 0.0  # a fault of the scale, not of the run
    assert float(after.loss_scale.scale) == 2.0**14
    unchanged = bits((after.params, after.opt, after.usual_norm))
    assert unchanged == before
    later, metrics = step(after, 0.5)
    assert metrics["train/overflow"] == 0.0
    assert bits((later.params, later.opt, later.usual_norm)).items() - unchanged.items()


def test_the_scale_falls_until_the_gradients_fit():
    state, overflows = start(2.0**16), 0
    for _ in range(6):
        state, metrics = step(state, 8.0)
        overflows += metrics["train/overflow"]
    assert overflows == 4  # 2^16 * 8 = 2^19, and float16 ends below 2^16
    assert float(state.loss_scale.scale) == 2.0**12


def test_at_the_least_scale_an_overflow_is_a_fault():
    state, metrics = step(start(1.0), np.inf)
    assert (metrics["train/overflow"], metrics["train/skipped"]) == (0.0, 1.0)
    assert float(state.loss_scale.scale) == 1.0


def test_a_loss_that_is_not_finite_is_a_fault_at_any_scale():
    after, metrics = step(start(), np.nan)
    assert (metrics["train/overflow"], metrics["train/skipped"]) == (0.0, 1.0)
    assert float(after.loss_scale.scale) == 2.0**15  # which it says nothing of


def test_after_many_steps_the_scale_doubles():
    state, _ = step(start(2.0**10, fin_steps=2000), 0.5)
    assert float(state.loss_scale.scale) == 2.0**11


def test_abstract_states_and_shardings_have_the_states_structure():
    state = start()
    abstract = abstract_state(ROLES, tiny.mesh(), F16)
    assert jax.tree.structure(state_shardings(ROLES, tiny.mesh(), F16)) == jax.tree.structure(state)
    assert {p: (a.shape, a.dtype) for p, a in flatten(abstract).items()} == {
        p: (a.shape, a.dtype) for p, a in flatten(state).items()
    }
    assert "loss_scale/scale" in flatten(state)  # so that checkpoints hold it
    assert not [
        path for path in flatten(new_state(ROLES, {"exit": tiny.shallow_exit()}, tiny.mesh())) if "scale" in path
    ]


@pytest.mark.parametrize("precision", [O2, F16])
def test_training_in_half_precision_follows_float32(precision):
    """The loss of ten steps, and of the first, near those in float32 and not equal to them."""
    narrow, wide = losses(precision), losses(Precision(jnp.dtype("float32")))
    assert narrow != wide
    assert narrow[-1] < narrow[0] - 0.3
    np.testing.assert_allclose(narrow, wide, atol=0.05)


@cache
def losses(precision: Precision) -> tuple[float, ...]:
    roles = {"policy": Role(lambda declare: Transformer(tiny.SHAPE, declare), ADAM)}
    objective = next_token_objective(dtype=precision.dtype, remat="none", exit_weight=0.0, exit_stride=4)
    update = make_update(objective, roles, tiny.mesh(), precision=precision)
    placed = jax.device_put(tiny.transformer(), shardings(roles["policy"].build, tiny.mesh()))
    state = new_state(roles, {"policy": placed}, tiny.mesh(), precision)
    if precision.scaled:  # where no step overflows, so that all take as many
        state = type(state)(
            state.step,
            state.params,
            state.opt,
            state.usual_norm,
            state.loss_scale.replace(scale=jax.device_put(jnp.float32(2.0**10), replicated(tiny.mesh()))),
        )
    rows = np.random.default_rng(0).integers(0, 50, (4, 9)).astype(np.int32)
    batch = {
        "tokens": rows[None, :, :-1],
        "targets": rows[None, :, 1:],
        "segments": np.ones((1, 4, 8), np.int32),
        "positions": np.tile(np.arange(8, dtype=np.int32), (1, 4, 1)),
        "weights": np.ones((1, 4, 8), np.float32),
    }
    found = []
    for _ in range(10):
        state, metrics = update(state, batch, np.float32(0.0))
        found.append(float(metrics["train/loss"]))
    return tuple(found)
