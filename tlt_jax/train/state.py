"""The train state: parameters by role, and each role's optimiser state.

Roles are "policy" (the transformer), "exit" (the shallow drafter's own parameters), "eagle", "value" and "reward". Each
role has its own optimiser and gradient clipping, so a drafter trained beside the policy never scales the policy's
update.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from flax.training.dynamic_scale import DynamicScale
from jax.sharding import Mesh

from tlt_jax.config.stage_sections import OptimizerConfig
from tlt_jax.models.declare import Declare, flatten, shardings, table, unflatten
from tlt_jax.parallel.hosts import put
from tlt_jax.parallel.sharding import abstract, replicated
from tlt_jax.train.optimizers import learning_rate, make_optimizer
from tlt_jax.train.precision import FLOAT32, Precision, loss_scale_of

Build = Callable[[Declare], nnx.Module]


@partial(
    jax.tree_util.register_dataclass, data_fields=["step", "params", "opt", "usual_norm", "loss_scale"], meta_fields=[]
)
@dataclass(frozen=True)
class TrainState:
    """`step` counts updates of the phase; `params` and `opt` map roles to modules and optimiser states; `usual_norm` is
    the running mean of the gradient's norm, 0 before the first; `loss_scale` that of float16, else None."""

    step: Any
    params: dict[str, Any]
    opt: dict[str, Any]
    usual_norm: Any
    loss_scale: DynamicScale | None = None


@dataclass(frozen=True)
class Role:
    """How one role is built and optimised."""

    build: Build
    optimizer: OptimizerConfig

    def abstract(self) -> Any:
        """The module with its arrays' shapes alone."""
        return self.build(Declare(lambda spec: jax.ShapeDtypeStruct(spec.shape, jnp.float32)))

    def transform(self) -> optax.GradientTransformation:
        return make_optimizer(self.optimizer, table(self.build))

    def rate(self, progress: jax.Array) -> jax.Array:
        return learning_rate(self.optimizer, progress)


def new_state(roles: dict[str, Role], params: dict[str, Any], mesh: Mesh, precision: Precision = FLOAT32) -> TrainState:
    """A state at step 0 with the given parameters (copied, since updates donate them) and fresh optimisers."""
    params = {role: jax.tree.map(jnp.copy, params[role]) for role in roles}
    opt = {
        name: jax.jit(role.transform().init, out_shardings=opt_shardings(role, mesh))(params[name])
        for name, role in roles.items()
    }
    scalar = partial(put, shardings=replicated(mesh))
    step, norm = (scalar(np.zeros((), dtype)) for dtype in (np.int32, np.float32))
    return TrainState(step, params, opt, norm, loss_scale_of(precision, scalar))


def abstract_state(roles: dict[str, Role], mesh: Mesh, precision: Precision = FLOAT32) -> TrainState:
    """The shapes and shardings of `new_state`'s arrays, of which none is made."""
    params = {name: role.abstract() for name, role in roles.items()}
    opt = {name: jax.eval_shape(role.transform().init, params[name]) for name, role in roles.items()}
    step, norm = (jax.ShapeDtypeStruct((), dtype) for dtype in (np.int32, np.float32))
    scale = loss_scale_of(precision, lambda number: jax.ShapeDtypeStruct(number.shape, number.dtype))
    state = TrainState(step, params, opt, norm, scale)
    return abstract(state, state_shardings(roles, mesh, precision))


def state_shardings(roles: dict[str, Role], mesh: Mesh, precision: Precision = FLOAT32) -> TrainState:
    """The state with a sharding in the place of each array."""
    params = {name: shardings(role.build, mesh) for name, role in roles.items()}
    opt = {name: opt_shardings(role, mesh) for name, role in roles.items()}
    scale = loss_scale_of(precision, lambda _: replicated(mesh))
    return TrainState(replicated(mesh), params, opt, replicated(mesh), scale)


def opt_shardings(role: Role, mesh: Mesh) -> Any:
    """An optimiser state's shardings: a moment lies as its parameter does, everything else is replicated."""
    wanted = shardings(role.build, mesh)
    params = role.abstract()
    by_path = flatten(wanted)
    shapes = {path: leaf.shape for path, leaf in flatten(params).items()}
    state = jax.eval_shape(role.transform().init, params)

    def place(path: str, leaf: jax.ShapeDtypeStruct) -> Any:
        owner = next((p for p in by_path if (path == p or path.endswith("/" + p)) and shapes[p] == leaf.shape), None)
        return by_path[owner] if owner else replicated(mesh)

    return unflatten(state, {path: place(path, leaf) for path, leaf in flatten(state).items()})
