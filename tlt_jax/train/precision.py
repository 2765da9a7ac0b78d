"""Number types of a training step, and dynamic loss scaling for the narrowest.

The levels are those of mixed-precision training (Micikevicius et al. 2018) under their usual names. O0: float32
everywhere. O1: activations and matrix products in the compute type; weights, gradients and optimiser in float32. O2:
the weights' matrices are cast once an update, and their gradients come in the compute type too; the optimiser keeps
float32 masters. Norms, biases, softmax and losses are in float32 at every level.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax.training.dynamic_scale import DynamicScale

from tlt_jax.config.device_sections import DeviceConfig
from tlt_jax.models.declare import ParamSpec, flatten, unflatten
from tlt_jax.parallel.mesh import compute_dtype

LEAST_SCALE = 1.0  # where an overflow is no longer the scale's


@dataclass(frozen=True)
class Precision:
    """`dtype`: of activations and matrix products; `half_weights`: level O2."""

    dtype: np.dtype
    half_weights: bool = False

    @property
    def scaled(self) -> bool:
        """Whether the loss is scaled, so that small gradients do not vanish: float16's range is narrow."""
        return self.dtype == jnp.float16


FLOAT32 = Precision(np.dtype("float32"))


def precision_of(config: DeviceConfig) -> Precision:
    """What the config asks for on the platform that is there."""
    return Precision(compute_dtype(config), config.precision == "O2")


def compute_weights(params: Any, specs: dict[str, ParamSpec], precision: Precision) -> Any:
    """The weights that the loss sees: a module of declarations `specs`, its matrices cast at level O2."""
    if not precision.half_weights:
        return params
    cast = {
        path: array.astype(precision.dtype) if specs[path].is_matrix else array
        for path, array in flatten(params).items()
    }
    return unflatten(params, cast)


def loss_scale_of(precision: Precision, make: Callable[[np.ndarray], Any]) -> DynamicScale | None:
    """A fresh loss scale whose two numbers are what `make` makes of them; None where none is needed."""
    if not precision.scaled:
        return None
    fresh = DynamicScale(minimum_scale=LEAST_SCALE)
    return fresh.replace(
        fin_steps=make(np.asarray(fresh.fin_steps, np.int32)), scale=make(np.asarray(fresh.scale, np.float32))
    )


def value_and_grad(loss: Callable, scale: DynamicScale | None) -> Callable:
    """f(params, batch) -> ((loss, metrics), gradients in float32, the scale after it).

    After gradients that are not finite the scale is half as large; after many that are, twice as large.
    """

    def plain(params: Any, batch: Any) -> tuple[Any, Any, None]:
        value, grads = jax.value_and_grad(loss, has_aux=True)(params, batch)
        return value, jax.tree.map(lambda g: g.astype(jnp.float32), grads), None

    def scaled(params: Any, batch: Any) -> tuple[Any, Any, DynamicScale]:
        assert scale is not None
        after, _, value, grads = scale.value_and_grad(loss, has_aux=True)(params, batch)
        return value, grads, after

    return plain if scale is None else scaled


def lowered_once(before: DynamicScale | None, after: Any, own: Any) -> Any:
    """The scale after several microbatches, all computed at the scale `before`: `own`, the latest one's, unless one of
    the earlier, whose scale is `after`, overflowed."""
    if before is None:
        return None
    return jax.tree.map(lambda a, o: jnp.where(after.scale < before.scale, a, o), after, own)
