"""Schedules by hand, and what every optimiser promises."""

from functools import cache
from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support import tiny

from tlt_jax.config.stage_sections import OptimizerConfig
from tlt_jax.models.declare import flatten, shardings, table
from tlt_jax.models.heads import ScalarHead
from tlt_jax.models.transformer import Transformer
from tlt_jax.train.optimizers import OPTIMIZERS, learning_rate, make_optimizer
from tlt_jax.train.state import Role, new_state
from tlt_jax.train.step import Objective, make_update

SCHEDULES = {
    # Peak 0.1, end 0.01. Warm-up over 0.2, so the fall takes 0.8.
    # cosine at a quarter: 0.01 + 0.09 * (1 + cos(pi / 4)) / 2 = 0.01 + 0.09 * 0.8535534
    "cosine": {0.0: 0.0, 0.05: 0.025, 0.1: 0.05, 0.2: 0.1, 0.4: 0.0868198, 0.6: 0.055, 1.0: 0.01},
    "linear": {0.0: 0.0, 0.1: 0.05, 0.2: 0.1, 0.4: 0.0775, 0.6: 0.055, 0.9: 0.02125, 1.0: 0.01},
    # constant up to 0.75, then linear
    "wsd": {0.0: 0.0, 0.1: 0.05, 0.2: 0.1, 0.5: 0.1, 0.75: 0.1, 0.875: 0.055, 1.0: 0.01},
}


@pytest.mark.parametrize("decay", SCHEDULES)
@pytest.mark.parametrize("as_array", [False, True])
def test_the_rate_by_hand(decay, as_array):
    config = OptimizerConfig(
        learning_rate=0.1, warmup_fraction=0.2, decay=decay, decay_fraction=0.25, final_fraction=0.1
    )
    for progress, rate in SCHEDULES[decay].items():
        found = learning_rate(config, jnp.float32(progress) if as_array else progress)
        assert float(found) == pytest.approx(rate, abs=2e-7), progress


@pytest.mark.parametrize("decay", SCHEDULES)
def test_without_warm_up_the_rate_starts_at_its_peak(decay):
    config = OptimizerConfig(
        learning_rate=0.1, warmup_fraction=0.0, decay=decay, decay_fraction=0.5, final_fraction=0.0
    )
    assert float(learning_rate(config, 0.0)) == pytest.approx(0.1, abs=1e-8)
    assert float(learning_rate(config, 1.0)) == pytest.approx(0.0, abs=1e-8)
    # Half way: cosine and linear have fallen by half, wsd begins to fall.
    assert float(learning_rate(config, 0.5)) == pytest.approx(0.1 if decay == "wsd" else 0.05, abs=1e-7)


@pytest.mark.parametrize("decay", SCHEDULES)
def test_a_warm_up_of_the_whole_phase_ends_at_the_peak(decay):
    config = OptimizerConfig(learning_rate=0.1, warmup_fraction=1.0, decay=decay)
    assert float(learning_rate(config, 0.5)) == pytest.approx(0.05, abs=1e-7)
    assert float(learning_rate(config, 0.999)) == pytest.approx(0.0999, abs=1e-6)


@pytest.mark.parametrize("decay", SCHEDULES)
def test_beyond_the_end_the_rate_stays(decay):
    config = OptimizerConfig(learning_rate=0.1, decay=decay, final_fraction=0.2)
    assert float(learning_rate(config, 1.3)) == pytest.approx(0.02, abs=1e-7)


def test_wsd_falls_over_what_warm_up_leaves():
    # Asked to fall over 0.9 after a warm-up of 0.5: it falls over the whole rest.
    config = OptimizerConfig(
        learning_rate=0.1, warmup_fraction=0.5, decay="wsd", decay_fraction=0.9, final_fraction=0.0
    )
    assert float(learning_rate(config, 0.75)) == pytest.approx(0.05, abs=1e-7)


def build(declare):
    return Transformer(tiny.SHAPE, declare)


# The parameters' own squares, so that the best ones are 0 and gradients are exact; `scale` 0 makes all gradients 0.
QUADRATIC = Objective(
    lambda batch, step: batch,
    lambda params, b: (b["scale"][0] * optax.tree.norm(params["policy"], squared=True), {}),
)
ONE, ZERO = ({"scale": jnp.full((1, 1), value)} for value in (1.0, 0.0))


@cache
def trainer(name: str):
    config = OptimizerConfig(
        name=name,
        learning_rate=0.02,
        weight_decay=0.5,
        warmup_fraction=0.5,
        decay="linear",
        final_fraction=1.0,
    )
    roles = {"policy": Role(build, config)}
    return make_update(QUADRATIC, roles, tiny.mesh()), roles


def fresh(roles):
    params = {"policy": jax.device_put(tiny.transformer(), shardings(build, tiny.mesh()))}
    return new_state(roles, params, tiny.mesh())


def arrays(state) -> dict[str, np.ndarray]:
    # Copies: the buffers are donated to the next update.
    return {path: np.array(array) for path, array in flatten(state.params["policy"]).items()}


def types(state) -> dict[str, tuple]:
    return {
        path: (array.shape, str(array.dtype)) for path, array in flatten((state.step, state.params, state.opt)).items()
    }


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_lowers_a_loss_and_keeps_types_and_structure(name):
    update, roles = trainer(name)
    state = fresh(roles)
    structure, like = jax.tree.structure(state), types(state)
    losses = []
    for _ in range(10):
        state, metrics = update(state, ONE, np.float32(1.0))
        losses.append(float(metrics["train/loss"]))
    assert all(later < earlier for earlier, later in pairwise(losses)), losses
    assert losses[-1] < 0.9 * losses[0]
    assert float(metrics["train/lr"]) == pytest.approx(0.02, abs=1e-8)
    assert int(state.step) == 10
    assert jax.tree.structure(state) == structure
    assert types(state) == like


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_no_optimizer_moves_a_parameter_at_rate_zero(name):
    update, roles = trainer(name)
    state = fresh(roles)
    before = arrays(state)
    state, metrics = update(state, ONE, np.float32(0.0))
    assert float(metrics["train/lr"]) == 0.0
    for path, after in arrays(state).items():
        np.testing.assert_array_equal(after, before[path], err_msg=path)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_weight_decay_touches_matrices_alone(name):
    """With gradients of 0 a matrix shrinks by rate * decay = 0.02 * 0.5, and a norm stays as it is."""
    update, roles = trainer(name)
    state = fresh(roles)
    before = arrays(state)
    state, _ = update(state, ZERO, np.float32(1.0))
    vectors = {"final_norm", "layers/attention_norm", "layers/mlp_norm"}
    assert vectors < before.keys()
    for path, after in arrays(state).items():
        np.testing.assert_allclose(after, before[path] * (1.0 if path in vectors else 0.99), rtol=1e-6, err_msg=path)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_weight_decay_leaves_a_scalar_heads_vector_alone(name):
    head = tiny.random_module(lambda d: ScalarHead(tiny.SHAPE, d), 0)
    transform = make_optimizer(OptimizerConfig(name=name, weight_decay=0.5), table(lambda d: ScalarHead(tiny.SHAPE, d)))
    updates, _ = transform.update(jax.tree.map(jnp.zeros_like, head), transform.init(head), head)
    for path, update in flatten(updates).items():
        np.testing.assert_array_equal(update, 0.0, err_msg=path)


def moments_of(state) -> dict[str, list[str]]:
    """{parameter: the names of its moments} in the policy's optimiser state."""
    specs = table(build)
    found = {path: [] for path in specs}
    for leaf, array in flatten(state.opt["policy"]).items():
        owner = next((path for path in specs if leaf.endswith("/" + path) and array.shape == specs[path].shape), None)
        if owner:
            found[owner].append(leaf.removesuffix("/" + owner).rsplit("/", 1)[-1])
    return {path: sorted(names) for path, names in found.items()}


def test_muon_handles_the_layers_matrices_and_adam_the_rest():
    moments = moments_of(fresh(trainer("muon")[1]))
    matrices = {path for path in moments if path.startswith(("layers/attention/", "layers/mlp/"))}
    assert len(matrices) == 7
    for path, names in moments.items():
        assert names == (["mu"] if path in matrices else ["mu", "nu"]), path


@pytest.mark.parametrize(("name", "expected"), [("adamw", ["mu", "nu"]), ("lion", ["mu"])])
def test_the_other_optimizers_moments(name, expected):
    assert set(map(tuple, moments_of(fresh(trainer(name)[1])).values())) == {tuple(expected)}


def test_muon_sees_each_layers_array_as_its_matrix():
    """The update of each layer equals that of plain Muon on the 2-D matrix of that layer, inputs by outputs."""
    specs, model = table(build), tiny.transformer()
    config = OptimizerConfig(name="muon", clip_norm=1e9)
    gradients = tiny.transformer(seed=7)
    transform = make_optimizer(config, specs)
    updates, _ = jax.jit(transform.update)(gradients, transform.init(model), model)
    plain = optax.contrib.muon(1.0, adam_b1=0.9, adam_b2=0.95)
    update_plain = jax.jit(plain.update)
    inputs = {
        "layers/attention/query": 1,
        "layers/attention/value": 1,
        "layers/attention/out": 2,
        "layers/mlp/gate": 1,
        "layers/mlp/down": 1,
    }
    for path, axes in inputs.items():
        shape = specs[path].shape
        as_matrix = (int(np.prod(shape[1 : 1 + axes])), int(np.prod(shape[1 + axes :])))
        for layer in range(tiny.SHAPE.layers):
            matrix, gradient = (flatten(tree)[path][layer].reshape(as_matrix) for tree in (model, gradients))
            expected, _ = update_plain({"w": gradient}, plain.init({"w": matrix}), {"w": matrix})
            found = flatten(updates)[path][layer].reshape(as_matrix)
            np.testing.assert_allclose(found, expected["w"], atol=2e-5, err_msg=f"{path} {layer}")


def test_muons_other_arrays_have_their_own_rate():
    """The update step multiplies by the rate of 0.1; what Adam handles has 0.3, three times as much."""
    specs, model = table(build), tiny.transformer()
    updates = []
    for adam_rate in (0.3, None):
        config = OptimizerConfig(name="muon", learning_rate=0.1, adam_learning_rate=adam_rate)
        transform = make_optimizer(config, specs)
        updates.append(flatten(jax.jit(transform.update)(tiny.transformer(seed=7), transform.init(model), model)[0]))
    for path, update in updates[0].items():
        matrix = path.startswith(("layers/attention/", "layers/mlp/"))
        np.testing.assert_allclose(update, updates[1][path] * (1 if matrix else 3), rtol=1e-5, atol=1e-7, err_msg=path)
