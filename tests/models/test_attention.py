"""Attention by blocks against JAX's own, and against positions that it must not see."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tlt_jax.models.attention import MOST_BLOCKS, SMALLEST_BLOCK, as_cached, causal_attention, mixed_values

HEADS, KV_HEADS, WIDTH = 4, 2, 8


def inputs(length: int, rows: int = 2, dtype: str = "float32"):
    keys = jax.random.split(jax.random.key(length), 4)
    q, k, v, d = (
        jax.random.normal(key, (rows, length, heads, WIDTH), dtype)
        for key, heads in zip(keys, (HEADS, KV_HEADS, KV_HEADS, HEADS), strict=True)
    )
    third = max(1, length // 3)
    segments = jnp.broadcast_to(1 + jnp.arange(length) // third, (rows, length)).at[0, -third:].set(0)
    return q, k, v, d, segments


@jax.jit
def reference(q, k, v, segments):
    mask = (segments[:, None, :, None] == segments[:, None, None, :]) & jnp.tril(jnp.ones((q.shape[1],) * 2, bool))
    return jax.nn.dot_product_attention(q, k, v, mask=mask)


@pytest.mark.parametrize("length", [1, SMALLEST_BLOCK, SMALLEST_BLOCK + 6, MOST_BLOCKS * SMALLEST_BLOCK + 9])
def test_values_and_gradients_are_those_of_plain_attention(length):
    q, k, v, d, segments = inputs(length)

    def weighed(attend, *qkv):
        return jnp.vdot(attend(*qkv, segments), d)

    np.testing.assert_allclose(
        jax.jit(causal_attention)(q, k, v, segments), reference(q, k, v, segments), rtol=1e-5, atol=1e-6
    )
    ours, plain = (
        jax.jit(jax.grad(partial(weighed, attend), argnums=(0, 1, 2)))(q, k, v)
        for attend in (causal_attention, reference)
    )
    for name, a, b in zip("qkv", ours, plain, strict=True):
        assert length == 1 or np.abs(b).max() > 0.1
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5, err_msg=name)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_narrow_types_stay_narrow_and_near(dtype):
    q, k, v, d, segments = inputs(70, dtype=dtype)
    out, back = jax.vjp(lambda *qkv: causal_attention(*qkv, segments), q, k, v)
    exact, exact_back = jax.vjp(
        lambda *qkv: causal_attention(*qkv, segments), *(a.astype("float32") for a in (q, k, v))
    )
    for found, expected in zip((out, *back(d)), (exact, *exact_back(d.astype("float32"))), strict=True):
        assert found.dtype == dtype
        np.testing.assert_allclose(found.astype("float32"), expected, atol=0.02 * np.abs(expected).max())


def test_nothing_over_queries_and_keys_is_kept_for_the_backward_pass():
    length = 3 * SMALLEST_BLOCK
    q, k, v, _, segments = inputs(length)
    kept = jax.tree.leaves(
        jax.eval_shape(lambda *qkv: jax.vjp(partial(causal_attention, segments_BS=segments), *qkv)[1], q, k, v)
    )
    assert kept
    assert max(a.size for a in kept) <= q.size < HEADS * length * SMALLEST_BLOCK


def test_what_a_query_may_not_see_has_no_influence_even_where_it_is_huge():
    q, k, v, d, segments = inputs(SMALLEST_BLOCK + 6)
    start = SMALLEST_BLOCK + 1
    spoilt = [a.at[:, start:].set(1e30) for a in (k, v)]
    plain, found = causal_attention(q, k, v, segments), causal_attention(q, *spoilt, segments)
    np.testing.assert_array_equal(found[:, :start], plain[:, :start])
    assert np.all(np.isfinite(jax.grad(lambda q: jnp.vdot(causal_attention(q, k, v, segments), d))(q)))


def test_a_block_of_decoding_gives_what_training_gives():
    q, k, v, _, segments = inputs(70)
    whole = causal_attention(q, k, v, jnp.ones_like(segments))
    positions = jnp.arange(66, 70)
    mask = jnp.broadcast_to(jnp.arange(70) <= positions[:, None], (2, 1, 4, 70))
    np.testing.assert_allclose(mixed_values(q[:, 66:], *as_cached(k, v), mask), whole[:, 66:], rtol=1e-5, atol=1e-6)
