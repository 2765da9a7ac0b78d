"""The one table of sharding rules, and the helpers that apply it.

Arrays name their axes logically ("embed", "heads", ...); only this table knows the mesh.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from tlt_jax.config import ConfigError
from tlt_jax.parallel.hosts import put

Rules = Mapping[str, str | tuple[str, ...] | None]

RULES: Rules = {
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

# Decoding reads every weight for a few tokens: split over fsdp they would cross the devices at each verification.
DECODE_RULES = {**RULES, "embed": None}


def partition(axes: Sequence[str | None], rules: Rules = RULES) -> P:
    """The PartitionSpec of an array whose dimensions are named `axes` (None: not split)."""
    return P(*(rules[axis] if axis is not None else None for axis in axes))


def named_sharding(
    mesh: Mesh,
    axes: Sequence[str | None],
    shape: Sequence[int] | None = None,
    name: str = "array",
    rules: Rules = RULES,
) -> NamedSharding:
    """The sharding of an array with the named `axes`.

    With `shape`, raises ConfigError where the mesh does not divide a dimension, naming the array.
    """
    spec = partition(axes, rules)
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


def batch_sharding(mesh: Mesh, leading: int = 0) -> NamedSharding:
    """The sharding of a batch, whose axis comes after `leading` other axes."""
    return NamedSharding(mesh, P(*([None] * leading), RULES["batch"]))


def put_batch(mesh: Mesh, batch: Any, leading: int = 0) -> Any:
    """Copies host arrays, the same in every process, to the mesh, split over the batch axis after `leading` others."""
    return put(batch, batch_sharding(mesh, leading))


def batch_part(mesh: Mesh, rows: int) -> tuple[int, int]:
    """(part, parts): which of how many equal parts of a batch of `rows` this process's devices hold.

    Raises ConfigError where they do not hold one run of its rows.
    """
    pieces = batch_sharding(mesh).addressable_devices_indices_map((rows,)).values()
    starts = sorted({piece[0].start or 0 for piece in pieces if piece})
    size = len(starts) * (rows // (mesh.shape["data"] * mesh.shape["fsdp"]))
    if starts[0] % size or starts[-1] - starts[0] >= size:
        raise ConfigError(
            f"`device.mesh.data` is {mesh.shape['data']}; expected a multiple or a divisor of the number of hosts, each"
            " of which reads one part of a batch"
        )
    return starts[0] // size, rows // size


def put_local_batch(mesh: Mesh, batch: Any, leading: int = 0) -> Any:
    """The global batch of which each process has its own part (`batch_part`)."""
    sharding = batch_sharding(mesh, leading)
    return jax.tree.map(lambda array: jax.make_array_from_process_local_data(sharding, array), batch)


def replicated(mesh: Mesh) -> NamedSharding:
    """The sharding of what every device holds whole."""
    return NamedSharding(mesh, P())


def abstract(tree: Any, shardings: Any) -> Any:
    """The shapes and types of `tree`, laid out by `shardings` (a tree of the same structure): what programs can be
    compiled for before anything is allocated."""
    return jax.tree.map(lambda a, s: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=s), tree, shardings)
