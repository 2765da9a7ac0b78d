"""The one update step of every stage: jitted, donated, sharded.

Shape suffixes: A microbatches, b rows of one microbatch.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax.training.dynamic_scale import DynamicScale
from jax.sharding import Mesh

from tlt_jax.models.declare import table
from tlt_jax.parallel.programs import Program
from tlt_jax.train.precision import FLOAT32, Precision, compute_weights, lowered_once, value_and_grad
from tlt_jax.train.state import Role, TrainState, state_shardings

NORM_MEMORY = 0.95  # weight of the past in the running mean of the gradient's norm
SLOW_MEMORY = 0.999  # and after a norm far below it
NO_GRADIENT = 1e-4  # a norm below it, as of equal rewards, is rounding: no mean begins with it

EACH = "each/"  # begins the names of what is not summed over microbatches

Batch = dict[str, jax.Array]
Metrics = dict[str, jax.Array]


class Objective(NamedTuple):
    """What a phase minimises.

    prepare(batch, step): sees the whole update [A, b, ...] and normalises its weights, so that denominators are
        global: over all microbatches and all devices.
    loss(params, microbatch): the microbatch's share of the loss and of each metric; the shares add up. A metric whose
        name ends in "_max" is the largest of the microbatches' instead; one whose name begins with "each/" is not
        summed: it comes back as [A, ...].
    """

    prepare: Callable[[Batch, jax.Array], Batch]
    loss: Callable[[dict[str, Any], Batch], tuple[jax.Array, Metrics]]


def normalised(weights: jax.Array) -> jax.Array:
    """Weights that sum to 1 over the whole update, or stay 0 where all are 0."""
    total = jnp.sum(weights)
    return jnp.where(total > 0, weights / jnp.where(total > 0, total, 1.0), 0.0)


def make_update(
    objective: Objective,
    roles: dict[str, Role],
    mesh: Mesh,
    spike_factor: float = 0.0,
    precision: Precision = FLOAT32,
) -> Program:
    """update(state, batch, progress, frozen=None, dry=None) -> (state, metrics). Arrays are [A, b, ...]; progress in
    [0, 1] sets the rates; `frozen` are models that the loss sees beside those that it trains. Where `dry` is given and
    true the state comes back as it was: the metrics are what that program makes of the batch, bit for bit.

    An update whose loss or gradients are not finite, or whose `train/grad_norm` is more than `spike_factor` (0: any)
    times its running mean, changes neither parameters nor optimisers; `train/skipped` is then 1. With a loss scale,
    gradients that only it made overflow are no fault: `train/overflow` is 1 instead, and the scale half as large. A
    loss that is not finite by itself leaves the scale as it is.

    The state is donated: use the one that comes back. Metrics are device scalars; `train/grad_norm` (before clipping)
    is the policy's, or all roles' where there is none, and `train/lr` the policy's, or the first role's.
    """
    transforms = {name: role.transform() for name, role in roles.items()}
    specs = {name: table(role.build) for name, role in roles.items()}
    main = "policy" if "policy" in roles else next(iter(roles))

    def update(
        state: TrainState,
        batch: Batch,
        progress: jax.Array,
        frozen: dict[str, Any] | None = None,
        dry: jax.Array | None = None,
    ) -> tuple[TrainState, Metrics]:
        batch = objective.prepare(batch, state.step)
        weights = {name: compute_weights(state.params[name], specs[name], precision) for name in roles}

        def loss(trained: dict[str, Any], microbatch: Batch) -> tuple[jax.Array, Metrics]:
            return objective.loss({**(frozen or {}), **trained}, microbatch)

        grads, metrics, loss_scale = _gradients(loss, weights, batch, state.loss_scale)
        params, opt = {}, {}
        with jax.named_scope("optimizer"):
            for name, role in roles.items():
                updates, opt[name] = transforms[name].update(grads[name], state.opt[name], state.params[name])
                rate = role.rate(progress)
                params[name] = jax.tree.map(lambda p, u, rate=rate: p + rate * u, state.params[name], updates)
        metrics["train/grad_norm"] = optax.tree.norm(grads["policy"] if "policy" in roles else grads)
        finite = jnp.isfinite(metrics["train/loss"])
        whole = finite & jnp.isfinite(optax.tree.norm(grads))
        sound, usual_norm = _judged(whole, metrics["train/grad_norm"], state.usual_norm, spike_factor)
        params, opt = jax.tree.map(partial(jnp.where, sound), (params, opt), (state.params, state.opt))
        metrics["train/skipped"] = 1.0 - sound
        metrics["train/lr"] = roles[main].rate(progress)
        if loss_scale is not None and state.loss_scale is not None:
            overflow = (loss_scale.scale < state.loss_scale.scale) & finite
            loss_scale = jax.tree.map(partial(jnp.where, finite), loss_scale, state.loss_scale)
            metrics["train/skipped"] *= 1.0 - overflow
            metrics |= {"train/overflow": 1.0 * overflow, "train/loss_scale": jnp.asarray(state.loss_scale.scale)}
        new = TrainState(state.step + 1, params, opt, usual_norm, loss_scale)
        return (new if dry is None else jax.tree.map(partial(jnp.where, dry), state, new)), metrics

    compiled = jax.jit(update, donate_argnums=0, out_shardings=(state_shardings(roles, mesh, precision), None))
    return Program("update", compiled, mesh, varies=1)


def _judged(finite: jax.Array, norm: jax.Array, usual: jax.Array, factor: float) -> tuple[jax.Array, jax.Array]:
    """(whether an update can be made, the running mean of the gradient's norm after it).

    A spike does not move the mean. A norm as far below it, as of a batch whose rewards are all equal, lets it fall
    slowly: after many of those, what is usual would be a spike.
    """
    if not factor:
        return finite, usual
    begun = jnp.where(norm > NO_GRADIENT, norm, 0.0)
    low = norm * factor < usual
    moved = jnp.where(low, SLOW_MEMORY * usual, NORM_MEMORY * usual + (1.0 - NORM_MEMORY) * norm)
    sound = finite & ((usual == 0.0) | (norm <= factor * usual))
    return sound, jnp.where(sound, jnp.where(usual == 0.0, begun, moved), usual)


def _gradients(
    loss: Callable, params: dict[str, Any], batch: Batch, scale: DynamicScale | None
) -> tuple[Any, Metrics, DynamicScale | None]:
    """Sums of gradients and metrics over the microbatches, and the loss scale after them."""
    differentiate = value_and_grad(loss, scale)

    def one(microbatch: Batch) -> tuple[Any, Metrics, DynamicScale | None]:
        with jax.named_scope("forward_backward"):
            (value, metrics), grads, after = differentiate(params, microbatch)
        return grads, {**metrics, "train/loss": value}, after

    first = {name: array[0] for name, array in batch.items()}
    if next(iter(batch.values())).shape[0] == 1:
        grads, metrics, after = one(first)
        return grads, {n: value[None] if n.startswith(EACH) else value for n, value in metrics.items()}, after
    grads, metrics, _ = jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), jax.eval_shape(one, first))
    start = {name: value - jnp.inf if name.endswith("_max") else value for name, value in _summed(metrics).items()}

    def add(total, microbatch):
        grads, metrics, after = one(microbatch)
        combined = {
            name: (jnp.maximum if name.endswith("_max") else jnp.add)(total[1][name], value)
            for name, value in _summed(metrics).items()
        }
        each = {name: value for name, value in metrics.items() if name.startswith(EACH)}
        return (jax.tree.map(jnp.add, total[0], grads), combined, lowered_once(scale, total[2], after)), each

    (grads, combined, scale), each = jax.lax.scan(add, (grads, start, scale), batch)
    return grads, {**combined, **each}, scale


def _summed(metrics: Metrics) -> Metrics:
    return {name: value for name, value in metrics.items() if not name.startswith(EACH)}
