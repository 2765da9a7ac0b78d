"""The head and its cross-entropy, chunk by chunk, against the plain loss."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tlt_jax.train.head_loss import chunked_cross_entropy
from tlt_jax.train.losses import cross_entropy, weighted_sum

ROWS, LENGTH, WIDTH, VOCAB = 3, 8, 5, 11


def inputs(dtype=jnp.float32):
    rng = np.random.default_rng(0)
    weights = rng.random((ROWS, LENGTH)).astype(np.float32)
    weights[1, 2:5] = 0.0
    return (
        jnp.asarray(rng.normal(size=(ROWS, LENGTH, WIDTH)), dtype),
        jnp.asarray(3.0 * rng.normal(size=(WIDTH, VOCAB)), dtype),
        jnp.asarray(rng.integers(0, VOCAB, (ROWS, LENGTH)), jnp.int32),
        jnp.asarray(weights),
    )


def plain(y_BSD, head_DV, targets_BS, weights_BS):
    logits_BSV = jnp.einsum("bsd,dv->bsv", y_BSD, head_DV, preferred_element_type=jnp.float32)
    return weighted_sum(cross_entropy(logits_BSV, targets_BS), weights_BS)


@pytest.mark.parametrize("chunk", [1, 2, 4, 8])
def test_loss_and_gradients_are_those_of_the_plain_loss(chunk):
    expected, gradients = jax.value_and_grad(plain, argnums=(0, 1))(*inputs())
    loss, found = jax.jit(jax.value_and_grad(lambda *args: 2.5 * chunked_cross_entropy(*args, chunk), argnums=(0, 1)))(
        *inputs()
    )
    assert float(chunked_cross_entropy(*inputs(), chunk)) == pytest.approx(float(expected), rel=1e-6)
    assert float(loss) == pytest.approx(2.5 * float(expected), rel=1e-6)
    for mine, theirs in zip(found, gradients, strict=True):
        np.testing.assert_allclose(mine, 2.5 * theirs, atol=2e-6)


def test_gradients_come_in_the_types_of_what_they_are_of():
    found = jax.grad(lambda *args: chunked_cross_entropy(*args, 4), argnums=(0, 1))(*inputs(jnp.bfloat16))
    expected = jax.grad(plain, argnums=(0, 1))(*inputs(jnp.bfloat16))
    for mine, theirs in zip(found, expected, strict=True):
        assert mine.dtype == jnp.bfloat16
        np.testing.assert_allclose(mine.astype(jnp.float32), theirs.astype(jnp.float32), atol=0.1, rtol=0.03)


@pytest.mark.parametrize("tokens", [2.0**11, 2.0**20])
def test_a_loss_scale_reaches_gradients_in_float16_before_they_are_rounded(tokens):
    """As in plain JAX, where the scale comes first: a weight of one over so many tokens alone would vanish."""
    y_BSD, head_DV, targets_BS, _ = inputs(jnp.float16)
    weights_BS = jnp.full((ROWS, LENGTH), 1.0 / tokens)

    def gradients(loss, scale, *args):
        found = jax.grad(lambda *a: scale * loss(*a), argnums=(0, 1))(*args)
        return [np.asarray(g, np.float32) / scale for g in found]

    exact = gradients(plain, 1.0, y_BSD.astype(jnp.float32), head_DV.astype(jnp.float32), targets_BS, weights_BS)
    found = gradients(
        lambda *a: chunked_cross_entropy(*a, 4), np.float32(2.0**16), y_BSD, head_DV, targets_BS, weights_BS
    )
    for mine, theirs in zip(found, exact, strict=True):
        assert mine.dtype == np.float32
        np.testing.assert_allclose(mine, theirs, atol=2e-3 * np.abs(theirs).max())


def test_large_logits_do_not_overflow():
    y_BSD, head_DV, targets_BS, weights_BS = inputs()
    loss, gradient = jax.value_and_grad(lambda y: chunked_cross_entropy(y, head_DV, targets_BS, weights_BS, 4))(
        1e4 * y_BSD
    )
    assert np.isfinite(float(loss))
    assert np.isfinite(np.asarray(gradient)).all()


def test_what_has_weight_zero_reaches_neither_loss_nor_gradient():
    y_BSD, head_DV, targets_BS, weights_BS = inputs()
    bad = y_BSD.at[1, 3].set(jnp.nan)
    loss, gradient = jax.value_and_grad(lambda y: chunked_cross_entropy(y, head_DV, targets_BS, weights_BS, 4))(bad)
    clean, expected = jax.value_and_grad(lambda y: chunked_cross_entropy(y, head_DV, targets_BS, weights_BS, 4))(y_BSD)
    assert float(loss) == float(clean)
    np.testing.assert_array_equal(gradient, expected)


def test_the_logits_of_a_batch_are_never_there():
    """Temporaries of a small chunk are a small part of the whole batch's logits."""
    rows, length, width, vocab = 4, 64, 8, 4096
    shapes = [(rows, length, width), (width, vocab), (rows, length), (rows, length)]
    args = [
        jax.ShapeDtypeStruct(s, d) for s, d in zip(shapes, [jnp.float32] * 2 + [jnp.int32, jnp.float32], strict=True)
    ]

    def temporaries(chunk: int) -> int:
        gradient = jax.jit(jax.grad(lambda *a: chunked_cross_entropy(*a, chunk), argnums=(0, 1)))
        return gradient.lower(*args).compile().memory_analysis().temp_size_in_bytes

    logits = 4 * rows * length * vocab
    assert temporaries(64) > logits
    assert temporaries(4) < 0.25 * logits
