"""The one table of sharding rules, and the helpers that apply it.

Arrays name their axes logically ("embed", "heads", ...); only this table knows the mesh.
"""

from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from tlt_jax.config import ConfigError

RULES: dict[str, str | tuple[str, ...] | None] = {
    "batch": ("data", "fsdp"),
    "vocab": "tensor",
    "embed": "fsdp",
    "heads": "tensor",
    "kv_heads": "tensor",
    "hidden": "tensor",
    "layers": None,
    "head_dim": None,
    "rank": None,
}


def partition(axes: Sequence[str | None]) -> P:
    """The PartitionSpec of an array whose dimensions are named `axes` (None: not split)."""
    return P(*(RULES[axis] if axis is not None else None for axis in axes))


def named_sharding(
    mesh: Mesh, axes: Sequence[str | None], shape: Sequence[int] | None = None, name: str = "array"
) -> NamedSharding:
    """The sharding of an array with the named `axes`.

    With `shape`, raises ConfigError where the mesh does not divide a dimension, naming the array.
    """
    spec = partition(axes)
    for size, axis, mesh_axes in zip(shape or (), axes, spec, strict=False):
        names = (mesh_axes,) if isinstance(mesh_axes, str) else mesh_axes or ()
        parts = 1
        for mesh_axis in names:
            parts *= mesh.shape[mesh_axis]
        if size % parts:
            raise ConfigError(
                f"`device.mesh`: {name} has {axis} = {size}, which {parts} devices ({', '.join(names)}) do not divide"
            )
    return NamedSharding(mesh, spec)


def constrain(x: jax.Array, *axes: str | None) -> jax.Array:
    """Fixes the sharding of an intermediate; outside a mesh (`jax.set_mesh`) it returns `x` as it is."""
    if jax.sharding.get_abstract_mesh().empty:
        return x
    return jax.lax.with_sharding_constraint(x, partition(axes))


def put_batch(mesh: Mesh, batch: Any, leading: int = 0) -> Any:
    """Copies host arrays to the mesh, split over the batch axis, which comes after `leading` other axes."""
    sharding = NamedSharding(mesh, P(*([None] * leading), RULES["batch"]))
    return jax.device_put(batch, sharding)


def replicated(mesh: Mesh) -> NamedSharding:
    """The sharding of what every device holds whole."""
    return NamedSharding(mesh, P())
