"""Small modules on top of the transformer: the shallow drafter's exit, and the scalar head of values and rewards."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from tlt_jax.models.declare import Declare
from tlt_jax.models.transformer import ModelShape, Transformer, project, rms_norm
from tlt_jax.parallel.sharding import constrain


class ShallowExit(nnx.Module):
    """The shallow drafter's own parameters: a low-rank residual and a norm before the target's head.

    The drafter is the target's first `exit_layer` layers (LayerSkip, Elhoushi et al. 2024); these few parameters
    let it leave there without pulling on the layers themselves.
    """

    def __init__(self, s: ModelShape, declare: Declare):
        self.shape = s
        self.down = declare("down", (s.width, s.exit_rank), ("embed", "rank"), s.width**-0.5)
        self.up = declare("up", (s.exit_rank, s.width), ("rank", "embed"), "zeros")
        self.norm = declare("norm", (s.width,), ("embed",), "ones")


class ScalarHead(nnx.Module):
    """One number a position: a value, or a reward. Starts at 0 everywhere."""

    def __init__(self, s: ModelShape, declare: Declare):
        self.shape = s
        self.weight = declare("weight", (s.width,), ("embed",), "zeros")
        self.bias = declare("bias", (), (), "zeros")


def exit_logits(model: Any, exit: ShallowExit, x_exit_BSD: jax.Array) -> jax.Array:
    """The drafter's logits [B, S, V] in float32 from what leaves layer `exit_layer`; `model` (or its decode
    view) lends its head alone."""
    return project(model, exit_states(exit, x_exit_BSD))


def exit_states(exit: ShallowExit, x_exit_BSD: jax.Array) -> jax.Array:
    """What leaves layer `exit_layer`, as the head sees it [B, S, D]."""
    with jax.named_scope("exit"):
        dtype = x_exit_BSD.dtype
        eps = exit.shape.norm_eps
        # Small enough to be put together: split, they would have the activations sent around.
        down, up = (constrain(a.astype(dtype), None, None) for a in (exit.down, exit.up))
        low_BSR = rms_norm(x_exit_BSD, jnp.ones_like(exit.norm), eps) @ down
        return rms_norm(x_exit_BSD + low_BSR @ up, exit.norm, eps)


def scalars(head: ScalarHead, model: Transformer, x_BSD: jax.Array) -> jax.Array:
    """One number a position [B, S], float32, from what leaves the last layer."""
    y_BSD = rms_norm(x_BSD, model.final_norm, model.shape.norm_eps).astype(jnp.float32)
    return y_BSD @ head.weight + head.bias
