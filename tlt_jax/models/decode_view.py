"""What decoding sees of the parameters, and its cache.

The view is the compute-type cast, unstacked into a tuple of per-layer trees, made once per update. Static slices of
stacked weights inside a loop would copy all of them, and a cache that rides through a scan over layers is copied too;
tuples of layers avoid both.

Shape suffixes: B slots, W tokens fed at once, T cache length, K key/value heads, N width of a head, D width.
"""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from tlt_jax.models.attention import mixed_values
from tlt_jax.models.declare import shardings
from tlt_jax.models.eagle import Eagle
from tlt_jax.models.heads import ShallowExit
from tlt_jax.models.transformer import Block, ModelShape, Transformer, block, cast, head_matrix, look_up, rotary
from tlt_jax.parallel.sharding import DECODE_RULES, named_sharding, replicated


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["embedding", "layers", "final_norm", "head", "exit", "eagle", "draft_model", "cos_sin"],
    meta_fields=["shape"],
)
@dataclass(frozen=True)
class DecodeView:
    """The parameters as decoding wants them, the drafters' among them: None for those that nobody drafts with. The
    head is never tied: on a CPU the product of 2 to 16 rows with the transposed embedding takes 1.6 to 2.7 times as
    long (128 wide, vocabulary 2,048). `cos_sin`: of the rotary embedding's angles, each [T, 1, N/2]; made where they
    are used, XLA would make them anew for each head of each layer."""

    embedding: jax.Array
    layers: tuple[Block, ...]
    final_norm: jax.Array
    head: jax.Array
    exit: ShallowExit | None
    eagle: Eagle | None
    draft_model: "DecodeView | None"
    cos_sin: tuple[jax.Array, jax.Array]
    shape: ModelShape


@partial(jax.tree_util.register_dataclass, data_fields=["key_BKNT", "value_BKTN"], meta_fields=[])
@dataclass(frozen=True)
class LayerCache:
    """One layer's keys and values, in the compute type, laid out as attention's products want them."""

    key_BKNT: jax.Array
    value_BKTN: jax.Array


Cache = tuple[LayerCache, ...]


def decode_view(
    model: Transformer,
    exit: ShallowExit | None,
    eagle: Eagle | None,
    draft_model: Transformer | None,
    dtype: jnp.dtype,
    length: int,
) -> DecodeView:
    """The view of the current parameters, for sequences of up to `length` tokens (pure; jit it). As in training, the
    final norm's scale is not cast."""
    s = model.shape
    cos, sin = rotary(jnp.arange(length)[None], s.head_dim, s.rope_theta)
    layers = tuple(jax.tree.map(lambda a, i=i: a[i].astype(dtype), model.layers) for i in range(s.layers))
    return DecodeView(
        cast(model.embedding, dtype),
        layers,
        model.final_norm,
        cast(head_matrix(model), dtype),
        exit,
        cast(eagle, dtype),
        None if draft_model is None else decode_view(draft_model, None, None, None, dtype, length),
        (cos[0], sin[0]),
        replace(s, tied=False),
    )


def view_shardings(s: ModelShape, mesh: Mesh, with_eagle: bool = False, draft: ModelShape | None = None) -> DecodeView:
    """The view with a sharding in the place of each array: over `tensor` alone; the exit, small, on every device.
    `draft`: the draft model's shape; it has no exit itself."""
    whole = shardings(lambda declare: Transformer(s, declare), mesh, DECODE_RULES)
    layer = jax.tree.map(lambda stacked: NamedSharding(mesh, P(*stacked.spec[1:])), whole.layers)
    head: Any = NamedSharding(mesh, P(*reversed(whole.embedding.spec))) if s.tied else whole.head
    exits = shardings(lambda declare: ShallowExit(s, declare), mesh) if s.exit_layer else None
    exit = jax.tree.map(lambda _: replicated(mesh), exits)
    eagle = shardings(lambda declare: Eagle(s, declare), mesh, DECODE_RULES) if with_eagle else None
    cos_sin: Any = (replicated(mesh), replicated(mesh))
    return DecodeView(
        whole.embedding,
        (layer,) * s.layers,
        whole.final_norm,
        head,
        exit,
        eagle,
        None if draft is None else view_shardings(draft, mesh),
        cos_sin,
        replace(s, tied=False),
    )


def cache_shardings(s: ModelShape, mesh: Mesh) -> Cache:
    """The cache with a sharding in the place of each array."""
    key = named_sharding(mesh, ("batch", "kv_heads", "head_dim", None))
    value = named_sharding(mesh, ("batch", "kv_heads", None, "head_dim"))
    return (LayerCache(key, value),) * s.layers  # type: ignore[arg-type]


def empty_cache(s: ModelShape, slots: int, length: int, dtype: jnp.dtype) -> Cache:
    """A cache for `slots` sequences of up to `length` positions: 2 * L * B * T * K * N numbers."""
    key = jnp.zeros((slots, s.kv_heads, s.head_dim, length), dtype)
    value = jnp.zeros((slots, s.kv_heads, length, s.head_dim), dtype)
    return tuple(LayerCache(key, value) for _ in range(s.layers))


def emptied(cache: Cache, slots: int, length: int) -> Cache:
    """An empty cache of the same layers for `slots` sequences of up to `length` positions."""

    def zeros(old: jax.Array, *sizes: int) -> jax.Array:
        return jnp.zeros((slots, old.shape[1], *sizes), old.dtype)

    return tuple(
        LayerCache(zeros(c.key_BKNT, c.key_BKNT.shape[2], length), zeros(c.value_BKTN, length, c.value_BKTN.shape[3]))
        for c in cache
    )


def embed(view: DecodeView, tokens_BW: jax.Array) -> jax.Array:
    """The embeddings [B, W, D] of the tokens."""
    return look_up(view.embedding, tokens_BW)


def write_rows(old: jax.Array, new: jax.Array, positions_BW: jax.Array) -> jax.Array:
    """[B, T, ...] with [B, W, ...] over whatever stood at each row's positions; beyond its length nothing is written.

    Row by row, so that each device writes its own rows: indexed by row and position at once, the entries of all rows
    would be sent to every device.
    """

    def write(old_T: jax.Array, new_W: jax.Array, positions_W: jax.Array) -> jax.Array:
        return old_T.at[positions_W].set(new_W, mode="drop", unique_indices=True)

    return jax.vmap(write)(old, new, positions_BW)


def written(old: LayerCache, k_BWKN: jax.Array, v_BWKN: jax.Array, positions_BW: jax.Array) -> LayerCache:
    """The cache with the new tokens' keys and values at their positions, as by `write_rows`."""
    if positions_BW.size == 1:
        # One row alone XLA would write twice, into two copies of the cache: another goes nowhere.
        k_BWKN, v_BWKN = (jnp.pad(a, ((0, 0), (0, 1), (0, 0), (0, 0))) for a in (k_BWKN, v_BWKN))
        positions_BW = jnp.pad(positions_BW, ((0, 0), (0, 1)), constant_values=old.value_BKTN.shape[2])

    def key(old_KNT: jax.Array, new_WKN: jax.Array, positions_W: jax.Array) -> jax.Array:
        return old_KNT.at[..., positions_W].set(jnp.moveaxis(new_WKN, 0, -1), mode="drop", unique_indices=True)

    def value(old_KTN: jax.Array, new_WKN: jax.Array, positions_W: jax.Array) -> jax.Array:
        return old_KTN.at[:, positions_W].set(new_WKN.swapaxes(0, 1), mode="drop", unique_indices=True)

    return LayerCache(
        jax.vmap(key)(old.key_BKNT, k_BWKN, positions_BW), jax.vmap(value)(old.value_BKTN, v_BWKN, positions_BW)
    )


def decode_layers(
    view: DecodeView, layers: tuple[Block, ...], cache: Cache, x_BWD: jax.Array, positions_BW: jax.Array
) -> tuple[jax.Array, Cache]:
    """Runs some of the view's `layers` on W new tokens a slot, at `positions`, writing their keys and values into
    `cache`.

    A token attends to the cache entries at positions up to its own. Entries beyond are whatever an earlier, rejected
    draft left: they are never attended to, because every position up to the newest fed token is written before it is
    read. Positions at or beyond the cache's length write nothing.
    """
    if not layers:
        return x_BWD, ()
    cos, sin = (table_T1N.at[positions_BW].get(mode="clip") for table_T1N in view.cos_sin)
    length = cache[0].key_BKNT.shape[3]
    mask_B1WT = jnp.arange(length) <= positions_BW[:, None, :, None]

    new_cache: list[LayerCache] = []
    for layer, old in zip(layers, cache, strict=True):

        def attend(q: jax.Array, k: jax.Array, v: jax.Array, old: LayerCache = old) -> tuple[jax.Array, Any]:
            kept = written(old, k, v, positions_BW)
            return mixed_values(q, kept.key_BKNT, kept.value_BKTN, mask_B1WT), kept

        x_BWD, kept = block(layer, x_BWD, (cos, sin), attend)
        new_cache.append(kept)
    return x_BWD, tuple(new_cache)
