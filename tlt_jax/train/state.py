"""The train state: parameters by role, and each role's optimiser state.

Roles are "policy" (the transformer), "exit" (the shallow drafter's own parameters), "value" and "reward". Each role
has its own optimiser and gradient clipping, so a drafter trained beside the policy never scales the policy's update.
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
from jax.sharding import Mesh

from tlt_jax.config.stage_sections import OptimizerConfig
from tlt_jax.models.declare import Declare, flatten, shardings, table, unflatten
from tlt_jax.parallel.hosts import put
from tlt_jax.parallel.sharding import replicated
from tlt_jax.train.optimizers import learning_rate, make_optimizer

Build = Callable[[Declare], nnx.Module]


@partial(jax.tree_util.register_dataclass, data_fields=["step", "params", "opt", "usual_norm"], meta_fields=[])
@dataclass(frozen=True)
class TrainState:
    """`step` counts updates of the phase; `params` and `opt` map roles to modules and optimiser states; `usual_norm` is
    the running mean of the gradient's norm, 0 before the first."""

    step: Any
    params: dict[str, Any]
    opt: dict[str, Any]
    usual_norm: Any


@dataclass(frozen=True)
class Role:
    """How one role is built and optimised."""

    build: Build
    optimizer: OptimizerConfig

    def transform(self) -> optax.GradientTransformation:
        return make_optimizer(self.optimizer, table(self.build))

    def rate(self, progress: jax.Array) -> jax.Array:
        return learning_rate(self.optimizer, progress)


def new_state(roles: dict[str, Role], params: dict[str, Any], mesh: Mesh) -> TrainState:
    """A state at step 0 with the given parameters (copied, since updates donate them) and fresh optimisers."""
    params = {role: jax.tree.map(jnp.copy, params[role]) for role in roles}
    opt = {
        name: jax.jit(role.transform().init, out_shardings=opt_shardings(role, mesh))(params[name])
        for name, role in roles.items()
    }
    step, norm = (put(np.zeros((), dtype), replicated(mesh)) for dtype in (np.int32, np.float32))
    return TrainState(step, params, opt, norm)


def state_shardings(roles: dict[str, Role], mesh: Mesh) -> TrainState:
    """The state with a sharding in the place of each array."""
    params = {name: shardings(role.build, mesh) for name, role in roles.items()}
    opt = {name: opt_shardings(role, mesh) for name, role in roles.items()}
    return TrainState(replicated(mesh), params, opt, replicated(mesh))


def opt_shardings(role: Role, mesh: Mesh) -> Any:
    """An optimiser state's shardings: a moment lies as its parameter does, everything else is replicated."""
    wanted = shardings(role.build, mesh)
    abstract = role.build(Declare(lambda spec: jax.ShapeDtypeStruct(spec.shape, jnp.float32)))
    by_path = flatten(wanted)
    shapes = {path: leaf.shape for path, leaf in flatten(abstract).items()}
    state = jax.eval_shape(role.transform().init, abstract)

    def place(path: str, leaf: jax.ShapeDtypeStruct) -> Any:
        owner = next((p for p in by_path if (path == p or path.endswith("/" + p)) and shapes[p] == leaf.shape), None)
        return by_path[owner] if owner else replicated(mesh)

    return unflatten(state, {path: place(path, leaf) for path, leaf in flatten(state).items()})
