"""The head and its cross-entropy in one, a chunk of positions at a time: the logits of a whole batch never exist.

The gradient is made beside the loss, while a chunk's logits are there, instead of in a backward pass that would need
all of them or make them again (after Liger Kernel's fused linear cross-entropy, Hsu et al. 2024). The arithmetic is
that of the plain loss.

Shape suffixes: B rows, S sequence, C positions of a chunk, D width, V vocabulary.
"""

from functools import partial

import jax
import jax.numpy as jnp

from tlt_jax.parallel.sharding import constrain


@partial(jax.custom_vjp, nondiff_argnums=(4,))
def chunked_cross_entropy(
    y_BSD: jax.Array, head_DV: jax.Array, targets_BS: jax.Array, weights_BS: jax.Array, chunk: int
) -> jax.Array:
    """sum over positions of weight * -log softmax(y @ head)[target], nats; `chunk` divides S. No gradient reaches the
    weights."""
    return _scan(y_BSD, head_DV, targets_BS, weights_BS, chunk, with_gradients=False)[0]


def _forward(y_BSD, head_DV, targets_BS, weights_BS, chunk):
    """The gradients of the loss over its largest weight: a weight is 1 over an update's tokens, too small for a narrow
    type, and the loss scale that would lift it comes with the cotangent, in the backward pass."""
    largest = jnp.max(weights_BS)
    unit = jnp.where(largest > 0, largest, 1.0)
    loss, (dy_BSD, dhead_DV) = _scan(y_BSD, head_DV, targets_BS, weights_BS / unit, chunk, with_gradients=True)
    return unit * loss, (dy_BSD, dhead_DV, unit, jnp.zeros((), head_DV.dtype))


def _backward(chunk, kept, cotangent):
    dy_BSD, dhead_DV, unit, of_heads_type = kept
    scale = cotangent * unit
    return (scale * dy_BSD).astype(dy_BSD.dtype), (scale * dhead_DV).astype(of_heads_type.dtype), None, None


chunked_cross_entropy.defvjp(_forward, _backward)


def _scan(y_BSD, head_DV, targets_BS, weights_BS, chunk, with_gradients):
    """(loss, (gradient of y in its type, gradient of head in float32)) or (loss, None)."""
    rows, length, width = y_BSD.shape

    def chunks(a: jax.Array) -> jax.Array:
        return a.reshape(rows, length // chunk, chunk, *a.shape[2:]).swapaxes(0, 1)

    def one(carry, inputs):
        loss, head_gradient_DV = carry
        y_BCD, targets_BC, weights_BC = inputs
        logits_BCV = constrain(
            jnp.einsum("bcd,dv->bcv", y_BCD, head_DV, preferred_element_type=jnp.float32), "batch", None, "vocab"
        )
        largest_BC1 = jnp.max(logits_BCV, axis=-1, keepdims=True)
        exp_BCV = jnp.exp(logits_BCV - largest_BC1)
        sum_BC1 = jnp.sum(exp_BCV, axis=-1, keepdims=True)
        at_target_BC1 = jnp.take_along_axis(logits_BCV, targets_BC[..., None], axis=-1)
        losses_BC = (jnp.log(sum_BC1) + largest_BC1 - at_target_BC1)[..., 0]
        loss += jnp.sum(jnp.where(weights_BC > 0, losses_BC, 0.0) * weights_BC)
        if not with_gradients:
            return (loss, head_gradient_DV), None
        scale_BC1 = weights_BC[..., None]
        is_target_BCV = jnp.arange(logits_BCV.shape[-1]) == targets_BC[..., None]
        d_BCV = exp_BCV * (scale_BC1 / sum_BC1) - jnp.where(is_target_BCV, scale_BC1, 0.0)
        d_BCV = jnp.where(scale_BC1 > 0, d_BCV, 0.0).astype(y_BCD.dtype)
        dy_BCD = jnp.einsum("bcv,dv->bcd", d_BCV, head_DV)
        head_gradient_DV += jnp.einsum("bcd,bcv->dv", y_BCD, d_BCV, preferred_element_type=jnp.float32)
        return (loss, head_gradient_DV), dy_BCD

    start = jnp.zeros((), jnp.float32), jnp.zeros(head_DV.shape if with_gradients else (), jnp.float32)
    whole = y_BSD, targets_BS, weights_BS
    if chunk == length:
        (loss, head_gradient_DV), dy_BSD = one(start, whole)
        return (loss, (dy_BSD, head_gradient_DV)) if with_gradients else (loss, None)
    (loss, head_gradient_DV), dy_NBCD = jax.lax.scan(one, start, tuple(map(chunks, whole)))
    if not with_gradients:
        return loss, None
    return loss, (dy_NBCD.swapaxes(0, 1).reshape(rows, length, width), head_gradient_DV)
