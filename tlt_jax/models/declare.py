"""Each array is declared once, where its module is built; everything else about it derives from that.

A module's constructor calls `declare(name, shape, axes, ...)` for every array and keeps what comes back. What comes
back is up to the `make` function: an initialised array, its sharding, its abstract shape, or a row of the parameter
table. So the same constructor gives the parameters, their shardings, the checkpoint's target and the Hugging Face map.
"""

import zlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh

from tlt_jax.parallel.sharding import RULES, Rules, abstract, named_sharding


@dataclass(frozen=True)
class ParamSpec:
    """The declaration of one array.

    `init` is "ones", "zeros", or the standard deviation of a truncated normal. `hf` is the name in a Hugging Face
    checkpoint ("{layer}" stands for the layer), None for what only we have. `transposed`: Hugging Face holds the
    array as a matrix [outputs, inputs].
    """

    path: str
    shape: tuple[int, ...]
    axes: tuple[str | None, ...]
    init: str | float
    hf: str | None = None
    transposed: bool = False

    @property
    def stacked(self) -> bool:
        return self.axes[:1] == ("layers",)

    @property
    def is_matrix(self) -> bool:
        """Whether it is a matrix, or a stack of such: no norm, no bias."""
        return len(self.axes) - self.stacked >= 2


@dataclass(frozen=True)
class Declare:
    """Hands declarations to `make`, with the path so far and, inside a stack of layers, a leading layer axis."""

    make: Callable[[ParamSpec], Any]
    path: str = ""
    stack: int | None = None

    def __call__(
        self,
        name: str,
        shape: tuple[int, ...],
        axes: tuple[str | None, ...],
        init: str | float,
        hf: str | None = None,
        transposed: bool = False,
    ) -> Any:
        if self.stack is not None:
            shape, axes = (self.stack, *shape), ("layers", *axes)
        return nnx.data(self.make(ParamSpec(self.path + name, shape, axes, init, hf, transposed)))

    def into(self, name: str, stack: int | None = None) -> "Declare":
        """For a submodule called `name`; `stack` layers of it on a leading axis."""
        return replace(self, path=f"{self.path}{name}/", stack=stack if stack is not None else self.stack)


def initial_array(key: jax.Array, spec: ParamSpec) -> jax.Array:
    """The array at initialisation, float32; its randomness depends on the key and the path alone."""
    if isinstance(spec.init, str):
        return {"ones": jnp.ones, "zeros": jnp.zeros}[spec.init](spec.shape, jnp.float32)
    key = jax.random.fold_in(key, zlib.crc32(spec.path.encode()))
    return spec.init * jax.random.truncated_normal(key, -3.0, 3.0, spec.shape, jnp.float32)


def initialise(build: Callable[[Declare], nnx.Module], mesh: Mesh, key: jax.Array) -> Any:
    """Builds a module of initialised arrays, each created where its sharding wants it."""
    return jax.jit(
        lambda key: build(Declare(lambda spec: initial_array(key, spec))), out_shardings=shardings(build, mesh)
    )(key)


def shardings(build: Callable[[Declare], nnx.Module], mesh: Mesh, rules: Rules = RULES) -> Any:
    """The module with a NamedSharding in the place of each array."""
    return build(Declare(lambda spec: named_sharding(mesh, spec.axes, spec.shape, spec.path, rules)))


def abstract_module(build: Callable[[Declare], nnx.Module], mesh: Mesh) -> Any:
    """The module with the shape, the type and the sharding of each array, of which none is made."""
    where = shardings(build, mesh)
    return abstract(build(Declare(lambda spec: jax.ShapeDtypeStruct(spec.shape, jnp.float32))), where)


def table(build: Callable[[Declare], nnx.Module]) -> dict[str, ParamSpec]:
    """{path: declaration} of a module, touching no device."""
    specs: dict[str, ParamSpec] = {}

    def record(spec: ParamSpec) -> jax.ShapeDtypeStruct:
        specs[spec.path] = spec
        return jax.ShapeDtypeStruct(spec.shape, jnp.float32)

    build(Declare(record))
    return specs


def flatten(tree: Any) -> dict[str, Any]:
    """A tree of arrays as {path: array}, paths joined by "/"; the form of a checkpoint."""
    return {
        jax.tree_util.keystr(path, simple=True, separator="/"): leaf
        for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]
    }


def unflatten(like: Any, flat: dict[str, Any]) -> Any:
    """The tree of `like`'s structure with the arrays of `flat`."""
    return jax.tree.unflatten(jax.tree.structure(like), [flat[path] for path in flatten(like)])
