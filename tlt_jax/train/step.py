"""The one update step of every stage: jitted, donated, sharded.

Shape suffixes: A microbatches, b rows of one microbatch.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

from tlt_jax.parallel.programs import Program
from tlt_jax.train.state import Role, TrainState, state_shardings

NORM_MEMORY = 0.95  # weight of the past in the running mean of the gradient's norm

Batch = dict[str, jax.Array]
Metrics = dict[str, jax.Array]


class Objective(NamedTuple):
    """What a phase minimises.

    prepare(batch, step): sees the whole update [A, b, ...] and normalises its weights, so that denominators are
        global: over all microbatches and all devices.
    loss(params, microbatch): the microbatch's share of the loss and of each metric; the shares add up. A metric whose
        name ends in "_max" is the largest of the microbatches' instead.
    """

    prepare: Callable[[Batch, jax.Array], Batch]
    loss: Callable[[dict[str, Any], Batch], tuple[jax.Array, Metrics]]


def normalised(weights: jax.Array) -> jax.Array:
    """Weights that sum to 1 over the whole update, or stay 0 where all are 0."""
    total = jnp.sum(weights)
    return jnp.where(total > 0, weights / jnp.where(total > 0, total, 1.0), 0.0)


def make_update(objective: Objective, roles: dict[str, Role], mesh: Mesh, spike_factor: float = 0.0) -> Program:
    """update(state, batch, progress) -> (state, metrics). Arrays are [A, b, ...]; progress in [0, 1] sets the rates.

    An update whose loss or gradients are not finite, or whose gradient's norm is more than `spike_factor` (0: any)
    times its running mean, changes neither parameters nor optimisers; `train/skipped` is then 1.

    The state is donated: use the one that comes back. Metrics are device scalars; `train/grad_norm` (before clipping)
    is the policy's, or all roles' where there is none, and `train/lr` the policy's, or the first role's.
    """
    transforms = {name: role.transform() for name, role in roles.items()}
    main = "policy" if "policy" in roles else next(iter(roles))

    def update(state: TrainState, batch: Batch, progress: jax.Array) -> tuple[TrainState, Metrics]:
        batch = objective.prepare(batch, state.step)
        grads, metrics = _gradients(objective, state.params, batch)
        params, opt = {}, {}
        with jax.named_scope("optimizer"):
            for name, role in roles.items():
                updates, opt[name] = transforms[name].update(grads[name], state.opt[name], state.params[name])
                rate = role.rate(progress)
                params[name] = jax.tree.map(lambda p, u, rate=rate: p + rate * u, state.params[name], updates)
        metrics["train/grad_norm"] = optax.tree.norm(grads["policy"] if "policy" in roles else grads)
        sound, usual_norm = _judged(metrics["train/loss"], grads, state.usual_norm, spike_factor)
        params, opt = jax.tree.map(partial(jnp.where, sound), (params, opt), (state.params, state.opt))
        metrics["train/skipped"] = 1.0 - sound
        metrics["train/lr"] = roles[main].rate(progress)
        return TrainState(state.step + 1, params, opt, usual_norm), metrics

    compiled = jax.jit(update, donate_argnums=0, out_shardings=(state_shardings(roles, mesh), None))
    return Program("update", compiled, mesh, varies=1)


def _judged(loss: jax.Array, grads: Any, usual: jax.Array, spike_factor: float) -> tuple[jax.Array, jax.Array]:
    """(whether an update can be made, the running mean of the gradient's norm after it)."""
    norm = optax.tree.norm(grads)
    sound = jnp.isfinite(loss) & jnp.isfinite(norm)
    if spike_factor:
        sound &= (usual == 0.0) | (norm <= spike_factor * usual)
    mean = jnp.where(usual == 0.0, norm, NORM_MEMORY * usual + (1.0 - NORM_MEMORY) * norm)
    return sound, jnp.where(sound, mean, usual)


def _gradients(objective: Objective, params: dict[str, Any], batch: Batch) -> tuple[Any, Metrics]:
    """Sums of gradients and metrics over the microbatches."""

    def one(microbatch: Batch) -> tuple[Any, Metrics]:
        with jax.named_scope("forward_backward"):
            (loss, metrics), grads = jax.value_and_grad(objective.loss, has_aux=True)(params, microbatch)
        return grads, {**metrics, "train/loss": loss}

    first = {name: array[0] for name, array in batch.items()}
    if next(iter(batch.values())).shape[0] == 1:
        return one(first)
    grads, metrics = jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), jax.eval_shape(one, first))
    zeros = grads, {name: value - jnp.inf if name.endswith("_max") else value for name, value in metrics.items()}

    def add(total, microbatch):
        grads, metrics = one(microbatch)
        combined = {
            name: (jnp.maximum if name.endswith("_max") else jnp.add)(total[1][name], value)
            for name, value in metrics.items()
        }
        return (jax.tree.map(jnp.add, total[0], grads), combined), None

    return jax.lax.scan(add, zeros, batch)[0]
