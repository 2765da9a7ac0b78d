"""Products with weights and the gated unit, with backward passes of their own.

The results are those of plain JAX; what differs is the work. On a CPU, the gradient of a weight as JAX writes it has
the incoming gradient transposed, and XLA makes all that leads to it once more in the transposed order.
"""

from functools import partial

import jax
from jax import lax
from jax.ad_checkpoint import checkpoint_name

KEPT = "product"  # under this name, what a backward pass may keep where it makes all else again


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def linear(x: jax.Array, weight: jax.Array, axes: int = 1) -> jax.Array:
    """[..., *in] times [*in, *out] over the `axes` axes of `in`: [..., *out], in x's type."""
    return _contracted(x, range(x.ndim - axes, x.ndim), weight, range(axes))


def _linear_forward(x, weight, axes):
    return checkpoint_name(linear(x, weight, axes), KEPT), (x, weight)


def _linear_backward(axes, kept, d):
    x, weight = kept
    outs, leading = weight.ndim - axes, x.ndim - axes
    dx = _contracted(d, range(d.ndim - outs, d.ndim), weight, range(axes, weight.ndim))
    return dx, _contracted(x, range(leading), d, range(leading))


linear.defvjp(_linear_forward, _linear_backward)


def _contracted(a: jax.Array, a_axes: range, b: jax.Array, b_axes: range) -> jax.Array:
    return lax.dot_general(a, b, ((tuple(a_axes), tuple(b_axes)), ((), ())))


@jax.custom_vjp
def swiglu(gate: jax.Array, up: jax.Array) -> jax.Array:
    """silu(gate) * up (Shazeer 2020)."""
    return jax.nn.silu(gate) * up


def _swiglu_forward(gate, up):
    return swiglu(gate, up), (gate, up)


def _swiglu_backward(kept, d):
    """With s = sigmoid(gate): silu' = s (1 + gate (1 - s)). The barrier keeps XLA from making the two gradients anew
    inside each product that reads them."""
    gate, up = kept
    s = jax.nn.sigmoid(gate)
    return lax.optimization_barrier((d * up * s * (1 + gate * (1 - s)), d * gate * s))


swiglu.defvjp(_swiglu_forward, _swiglu_backward)
