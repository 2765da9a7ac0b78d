"""The transformer: packing, causality, remat, the decoding cache, grouped queries and the exit.

Shape suffixes as in tlt_jax/models/transformer.py.
"""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tlt_jax.models.decode_view import decode_layers, decode_view, embed, empty_cache
from tlt_jax.models.heads import ScalarHead, ShallowExit, exit_logits, scalars
from tlt_jax.models.transformer import hidden_states, logits


def whole(model, tokens, segments=None, positions=None):
    """(logits, x_exit, x_final) of rows of tokens; by default each row is one document."""
    tokens = jnp.asarray(tokens)
    segments = jnp.ones_like(tokens) if segments is None else jnp.asarray(segments)
    if positions is None:
        positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    return jax.tree.map(np.asarray, _whole(model, tokens, segments, jnp.asarray(positions)))


@jax.jit
def _whole(model, tokens, segments, positions):
    x_exit, x_final = hidden_states(model, tokens, segments, positions, dtype=jnp.float32)
    return logits(model, x_final), x_exit, x_final


@jax.jit
def feed(view, cache, tokens, positions):
    """(what leaves the last layer, cache) after tokens at positions."""
    return decode_layers(view, view.layers, cache, embed(view, tokens), positions)


def tokens_of(*lengths):
    rng = np.random.default_rng(lengths)
    return [rng.integers(0, 61, n).astype(np.int32) for n in lengths]


def test_packed_documents_do_not_see_each_other(shape, random_module):
    model = random_module(shape())
    one, two = tokens_of(5, 7)
    packed = whole(
        model,
        np.concatenate([one, two, [0, 0]])[None].astype(np.int32),
        np.array([[1] * 5 + [2] * 7 + [0, 0]]),
        np.array([[*range(5), *range(7), 0, 0]]),
    )
    for alone, cells in ((one, slice(0, 5)), (two, slice(5, 12))):
        for found, expected in zip(packed, whole(model, alone[None]), strict=True):
            np.testing.assert_allclose(found[:, cells], expected, atol=1e-5)


def test_padding_on_the_right_changes_nothing(shape, random_module):
    model = random_module(shape())
    (tokens,) = tokens_of(6)
    segments, positions = np.array([[1] * 6 + [0] * 4]), np.array([[*range(6), 0, 0, 0, 0]])
    padded = whole(model, np.pad(tokens, (0, 4))[None], segments, positions)
    np.testing.assert_allclose(padded[0][:, :6], whole(model, tokens[None])[0], atol=1e-5)
    assert np.isfinite(padded[0]).all()


def test_a_later_token_leaves_earlier_logits(shape, random_module):
    model = random_module(shape())
    (tokens,) = tokens_of(8)
    changed = tokens.copy()
    changed[5] = (changed[5] + 1) % 61
    before, after = whole(model, tokens[None])[0], whole(model, changed[None])[0]
    np.testing.assert_array_equal(before[:, :5], after[:, :5])
    assert (np.abs(before[:, 5:] - after[:, 5:]).max(axis=-1) > 1e-4).all()


def test_positions_count_by_their_differences_alone(shape, random_module):
    model = random_module(shape())
    (tokens,) = tokens_of(8)
    at_0 = whole(model, tokens[None])[0]
    np.testing.assert_allclose(whole(model, tokens[None], positions=np.arange(40, 48)[None])[0], at_0, atol=1e-4)
    assert np.abs(whole(model, tokens[None], positions=2 * np.arange(8)[None])[0] - at_0).max() > 1e-2


def test_remat_gives_equal_gradients(shape, random_module):
    model = random_module(shape())
    (tokens,) = tokens_of(8)
    rows, ones, positions = tokens[None], jnp.ones((1, 8), jnp.int32), jnp.arange(8)[None]

    @partial(jax.jit, static_argnames="policy")
    def gradients(model, policy):
        def loss(model):
            x_exit, x_final = hidden_states(model, rows, ones, positions, dtype=jnp.float32, remat=policy)
            return jnp.mean(jax.nn.log_softmax(logits(model, x_final))[..., 3]) + jnp.mean(x_exit**2)

        return jax.grad(loss)(model)

    plain, dots, full = (jax.tree.leaves(gradients(model, policy)) for policy in ("none", "dots", "full"))
    for a, b, c in zip(plain, dots, full, strict=True):
        assert np.abs(a).max() > 0
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)
        np.testing.assert_allclose(a, c, rtol=1e-4, atol=1e-6)


def fed_in_pieces(view, cache, tokens_BS, sizes):
    outputs, start = [], 0
    for size in sizes:
        positions = start + jnp.broadcast_to(jnp.arange(size), (len(tokens_BS), size))
        x, cache = feed(view, cache, tokens_BS[:, start : start + size], positions)
        outputs.append(x)
        start += size
    return np.concatenate(outputs, axis=1)


@pytest.mark.parametrize("tied", [True, False])
def test_the_cache_gives_what_a_whole_pass_gives(shape, random_module, tied):
    s = shape(tied=tied)
    model = random_module(s)
    tokens = np.stack(tokens_of(6, 6))
    expected_logits, _, expected = whole(model, tokens)
    view = decode_view(model, None, None, None, jnp.float32, 9)
    found = fed_in_pieces(view, empty_cache(s, 2, 9, jnp.float32), tokens, (1, 3, 2))
    np.testing.assert_allclose(found, expected, atol=1e-5)
    np.testing.assert_allclose(logits(view, found), expected_logits, atol=1e-5)


def test_stale_cache_entries_have_no_influence(shape, random_module):
    s = shape()
    model = random_module(s)
    view = decode_view(model, None, None, None, jnp.float32, 9)
    tokens = np.stack(tokens_of(6, 6))
    rng = np.random.default_rng(0)
    empty = empty_cache(s, 2, 9, jnp.float32)
    stale = jax.tree.map(lambda a: jnp.asarray(100 * rng.normal(size=a.shape), a.dtype), empty)
    clean = fed_in_pieces(view, empty, tokens, (1, 3, 2))
    np.testing.assert_array_equal(fed_in_pieces(view, stale, tokens, (1, 3, 2)), clean)


def test_slots_stand_at_positions_of_their_own(shape, random_module):
    s = shape()
    model = random_module(s)
    view = decode_view(model, None, None, None, jnp.float32, 9)
    tokens = np.stack(tokens_of(7, 7))
    start = jnp.broadcast_to(jnp.arange(5), (2, 5))
    _, cache = feed(view, empty_cache(s, 2, 9, jnp.float32), tokens[:, :5], start)
    # Row 0 goes on at 5; row 1 drops two tokens and goes on at 3.
    new, positions = np.stack([tokens[0, 5:7], tokens[1, 5:7]]), jnp.array([[5, 6], [3, 4]])
    found, _ = feed(view, cache, new, positions)
    np.testing.assert_allclose(found[0], whole(model, tokens[:1])[2][0, 5:], atol=1e-5)
    row = np.concatenate([tokens[1, :3], tokens[1, 5:7]])[None]
    np.testing.assert_allclose(found[1], whole(model, row)[2][0, 3:], atol=1e-5)


def test_nothing_is_written_beyond_the_cache(shape, random_module):
    s = shape()
    view = decode_view(random_module(s), None, None, None, jnp.float32, 9)
    cache = empty_cache(s, 1, 4, jnp.float32)
    _, after = feed(view, cache, jnp.array([[1, 2, 3]]), jnp.array([[3, 4, 5]]))
    for layer in after:
        assert np.abs(layer.key_BKNT[0, ..., 3]).max() > 0
        assert np.abs(layer.key_BKNT[0, ..., :3]).max() == 0


def test_grouped_queries_equal_repeated_heads(shape, random_module):
    s = shape()
    model = random_module(s)
    wide = random_module(replace(s, kv_heads=s.heads))
    layers, repeat = model.layers, partial(jnp.repeat, repeats=s.heads // s.kv_heads, axis=2)
    for path in ("embedding", "final_norm", "head"):
        setattr(wide, path, getattr(model, path))
    for path in ("attention_norm", "mlp_norm", "mlp"):
        setattr(wide.layers, path, getattr(layers, path))
    wide.layers.attention.query, wide.layers.attention.out = layers.attention.query, layers.attention.out
    wide.layers.attention.key = repeat(layers.attention.key)
    wide.layers.attention.value = repeat(layers.attention.value)
    tokens = np.stack(tokens_of(8, 8))
    np.testing.assert_allclose(whole(model, tokens)[0], whole(wide, tokens)[0], atol=1e-5)


@pytest.mark.parametrize("tied", [True, False])
def test_an_exit_without_residual_is_a_shorter_model(shape, random_module, tied):
    s = shape(tied=tied)
    model, exit = random_module(s), random_module(s, ShallowExit)
    exit.up, exit.norm = jnp.zeros_like(exit.up), model.final_norm
    short = random_module(replace(s, layers=s.exit_layer, exit_layer=1))
    short.embedding, short.final_norm = model.embedding, model.final_norm
    if not tied:
        short.head = model.head
    first = [array[: s.exit_layer] for array in jax.tree.leaves(model.layers)]
    short.layers = jax.tree.unflatten(jax.tree.structure(short.layers), first)
    tokens = np.stack(tokens_of(8, 8))
    found = exit_logits(model, exit, jnp.asarray(whole(model, tokens)[1]))
    np.testing.assert_allclose(found, whole(short, tokens)[0], atol=1e-5)


def test_a_new_scalar_head_says_0(shape, random_module):
    s = shape()
    model, head = random_module(s), random_module(s, ScalarHead)
    (tokens,) = tokens_of(5)
    _, _, x = whole(model, tokens[None])
    y = x / np.sqrt((x**2).mean(-1, keepdims=True) + s.norm_eps) * np.asarray(model.final_norm)
    np.testing.assert_allclose(scalars(head, model, x), y @ np.asarray(head.weight) + float(head.bias), atol=1e-5)
    head.weight, head.bias = jnp.zeros_like(head.weight), jnp.zeros_like(head.bias)
    assert np.abs(scalars(head, model, x)).max() == 0
