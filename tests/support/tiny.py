"""Tiny models and meshes that the tests share."""

from dataclasses import replace

import jax
import jax.numpy as jnp
from flax import nnx

from tlt_jax.config.device_sections import MeshConfig
from tlt_jax.models.declare import Declare, flatten, initial_array, unflatten
from tlt_jax.models.eagle import Eagle
from tlt_jax.models.heads import ShallowExit
from tlt_jax.models.transformer import ModelShape, Transformer, hidden_states, logits
from tlt_jax.parallel.mesh import make_mesh

SHAPE = ModelShape(vocab=50, width=16, layers=3, heads=4, kv_heads=2, head_dim=4, hidden=24, exit_layer=1, exit_rank=4)


def mesh():
    return make_mesh(MeshConfig())


def random_module(build, seed: int, scale: float = 1.0) -> nnx.Module:
    """A module of arrays drawn at `scale` times their initial deviation; what starts at 0 is drawn too."""

    def make(spec):
        array = initial_array(jax.random.key(seed), spec)
        if spec.init == "zeros":
            array = 0.3 * jax.random.normal(jax.random.fold_in(jax.random.key(seed), len(spec.path)), spec.shape)
        return jnp.asarray(array if spec.init == "ones" else scale * array)

    return build(Declare(make))


def transformer(shape: ModelShape = SHAPE, seed: int = 0, scale: float = 1.0) -> Transformer:
    return random_module(lambda d: Transformer(shape, d), seed, scale)


def shallow_exit(shape: ModelShape = SHAPE, seed: int = 1, scale: float = 1.0) -> ShallowExit:
    return random_module(lambda d: ShallowExit(shape, d), seed, scale)


def eagle(shape: ModelShape = SHAPE, seed: int = 1, scale: float = 1.0) -> Eagle:
    return random_module(lambda d: Eagle(shape, d), seed, scale)


def draft_shape(shape: ModelShape = SHAPE) -> ModelShape:
    """The shape of a draft model for a model of `shape`."""
    return replace(shape, width=8, layers=2, heads=2, kv_heads=1, head_dim=4, hidden=16, exit_layer=0, exit_rank=0)


def with_scaled(module: nnx.Module, path: str, scale: float) -> nnx.Module:
    """The module with one of its arrays times `scale`."""
    arrays = flatten(module)
    return unflatten(module, arrays | {path: scale * arrays[path]})


def perfect_pair(shape: ModelShape = SHAPE, seed: int = 0, scale: float = 1.0) -> tuple[Transformer, ShallowExit]:
    """A model whose layers after the exit add nothing, and the exit that equals its head: every draft stands."""
    model, exit = transformer(shape, seed, scale), shallow_exit(shape)
    arrays, exit_arrays = flatten(model), flatten(exit)
    for path in ("layers/attention/out", "layers/mlp/down"):
        arrays[path] = arrays[path].at[shape.exit_layer :].set(0.0)
    exit_arrays |= {"up": jnp.zeros_like(exit_arrays["up"]), "norm": arrays["final_norm"]}
    return unflatten(model, arrays), unflatten(exit, exit_arrays)


def plain_logits(model: Transformer, tokens_BT: jax.Array) -> jax.Array:
    """Next-token logits [B, T, V] of right-padded rows by the training forward pass: no cache, no drafter."""
    positions_BT = jnp.broadcast_to(jnp.arange(tokens_BT.shape[1]), tokens_BT.shape)
    _, x_BTD = hidden_states(model, tokens_BT, jnp.ones_like(tokens_BT), positions_BT, dtype=jnp.float32)
    return logits(model, x_BTD)
