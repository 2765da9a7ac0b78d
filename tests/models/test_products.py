"""Products and the gated unit, with gradients of their own, against plain JAX's."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tlt_jax.models.products import linear, swiglu

CASES = {
    "into heads": ((2, 3, 8), (8, 4, 5), 1, "bsd,dhn->bshn"),
    "out of heads": ((2, 3, 4, 5), (4, 5, 8), 2, "bshn,hnd->bsd"),
    "a matrix": ((6, 8), (8, 7), 1, "md,df->mf"),
}


def of(key: int, shape, dtype="float32"):
    return jax.random.normal(jax.random.key(key), shape, dtype)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("case", CASES)
def test_a_product_and_its_gradients_are_those_of_einsum(case, dtype):
    x_shape, w_shape, axes, equation = CASES[case]
    x, w = of(0, x_shape, dtype), of(1, w_shape, dtype)
    out, back = jax.vjp(lambda x, w: linear(x, w, axes), x, w)
    expected, expected_back = jax.vjp(lambda x, w: jnp.einsum(equation, x, w), x, w)
    d = of(2, expected.shape, dtype)
    for a, b in zip((out, *back(d)), (expected, *expected_back(d)), strict=True):
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        tolerance = 1e-5 if dtype == "float32" else 0.02 * float(np.abs(b).max())
        np.testing.assert_allclose(a.astype("float32"), b.astype("float32"), atol=tolerance)


def test_the_gated_unit_and_its_gradients_are_those_of_its_formula():
    gate, up, d = of(3, (4, 5)), of(4, (4, 5)), of(5, (4, 5))
    out, back = jax.vjp(swiglu, gate, up)
    np.testing.assert_allclose(out, gate / (1 + np.exp(-gate)) * up, rtol=1e-5)
    expected = jax.vjp(lambda gate, up: gate / (1 + jnp.exp(-gate)) * up, gate, up)[1](d)
    for a, b in zip(back(d), expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)


def test_the_gated_unit_keeps_its_two_inputs_alone_for_the_backward_pass():
    gate, up = of(6, (4, 5)), of(7, (4, 5))
    assert len(jax.tree.leaves(jax.vjp(swiglu, gate, up)[1])) == 2
