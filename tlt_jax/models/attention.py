"""Scaled dot-product attention with grouped queries (Vaswani et al. 2017; Ainslie et al. 2023), softmax in float32.

Training's and scoring's goes over blocks of queries: keys that causality hides from a whole block are not looked at,
and the backward pass makes the probabilities again from the logarithms of their sums, a block at a time, so that no
array over queries and keys outlives its block (after FlashAttention-2, Dao 2023). Decoding's is one such block.

Shape suffixes: B batch, S queries, T keys, H heads, K key/value heads, G queries of one, N width of a head.
"""

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from tlt_jax.models.products import KEPT

SMALLEST_BLOCK, MOST_BLOCKS = 64, 8
HIDDEN = -1e30  # the score of what the mask hides: finite, so that no gradient is NaN


def mixed_values(q_BSHN: jax.Array, k_BKNT: jax.Array, v_BKTN: jax.Array, mask_B1ST: jax.Array) -> jax.Array:
    """What each query reads, [B, S, H, N], where the mask is true; each query has a key that it sees. Keys and values
    come laid out for the products, as caches keep them: on a CPU, XLA would turn all of them round, each time."""
    products_BKGST = _product("bkgsn,bknt->bkgst", _heads_first(q_BSHN, k_BKNT.shape[1]), k_BKNT)
    scores_BKGST = _scores(products_BKGST, q_BSHN.shape[-1], mask_B1ST)
    return _heads_last(_one_block(scores_BKGST, v_BKTN)[0])


def as_cached(k_BTKN: jax.Array, v_BTKN: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(keys [B, K, N, T], values [B, K, T, N]), as `mixed_values` wants them."""
    return k_BTKN.transpose(0, 2, 3, 1), v_BTKN.swapaxes(1, 2)


@jax.custom_vjp
def causal_attention(q_BSHN: jax.Array, k_BSKN: jax.Array, v_BSKN: jax.Array, segments_BS: jax.Array) -> jax.Array:
    """What each position reads, [B, S, H, N], from those of its own segment up to itself."""
    return _forward(q_BSHN, k_BSKN, v_BSKN, segments_BS)[0]


def _forward(q_BSHN, k_BSKN, v_BSKN, segments_BS):
    q_BKGSN, k_BKSN, v_BKSN = _heads_first(q_BSHN, k_BSKN.shape[2]), k_BSKN.swapaxes(1, 2), v_BSKN.swapaxes(1, 2)
    blocks = [
        _one_block(
            _all_scores(q_BKGSN[..., start:end, :], k_BKSN[:, :, :end], _mask(segments_BS, start, end)),
            v_BKSN[:, :, :end],
        )
        for start, end in _blocks(q_BSHN.shape[1])
    ]
    mixed_BKGSN = checkpoint_name(jnp.concatenate([mixed for mixed, _ in blocks], axis=3), KEPT)
    log_sums = [checkpoint_name(log_sum_BKGS1, KEPT) for _, log_sum_BKGS1 in blocks]
    return _heads_last(mixed_BKGSN), (q_BKGSN, k_BKSN, v_BKSN, segments_BS, mixed_BKGSN, log_sums)


def _backward(kept, d_BSHN):
    """With P the probabilities, O = P V and D = rowsum(dO * O): dV = P^T dO, dS = P * (dO V^T - D), dQ = dS K and
    dK = dS^T Q, both times the scale (FlashAttention-2, section 2.2)."""
    q_BKGSN, k_BKSN, v_BKSN, segments_BS, mixed_BKGSN, log_sums = kept
    d_BKGSN = _heads_first(d_BSHN, k_BKSN.shape[1])
    along_BKGS1 = jnp.sum(d_BKGSN.astype(jnp.float32) * mixed_BKGSN.astype(jnp.float32), axis=-1, keepdims=True)
    scale = q_BKGSN.shape[-1] ** -0.5
    dq, dk_BKSN, dv_BKSN = [], jnp.zeros(k_BKSN.shape, jnp.float32), jnp.zeros(v_BKSN.shape, jnp.float32)
    for (start, end), log_sum_BKGS1 in zip(_blocks(d_BSHN.shape[1]), log_sums, strict=True):
        q, d, along = (a[..., start:end, :] for a in (q_BKGSN, d_BKGSN, along_BKGS1))
        k, v = k_BKSN[:, :, :end], v_BKSN[:, :, :end]
        p_BKGST = jnp.exp(_all_scores(q, k, _mask(segments_BS, start, end)) - log_sum_BKGS1)
        ds_BKGST = (p_BKGST * (_product("bkgsn,bktn->bkgst", d, v) - along) * scale).astype(q.dtype)
        dq.append(_product("bkgst,bktn->bkgsn", ds_BKGST, k))
        dk_BKSN = dk_BKSN.at[:, :, :end].add(_product("bkgst,bkgsn->bktn", ds_BKGST, q))
        dv_BKSN = dv_BKSN.at[:, :, :end].add(_product("bkgst,bkgsn->bktn", p_BKGST.astype(v.dtype), d))
    dq_BSHN = _heads_last(jnp.concatenate(dq, axis=3)).astype(q_BKGSN.dtype)
    return dq_BSHN, *(a.swapaxes(1, 2).astype(k_BKSN.dtype) for a in (dk_BKSN, dv_BKSN)), None


causal_attention.defvjp(_forward, _backward)


def _blocks(length: int) -> list[tuple[int, int]]:
    """(start, end) of each block of queries: few, for each is compiled by itself, and none needlessly small."""
    size = max(SMALLEST_BLOCK, -(-length // MOST_BLOCKS))
    return [(start, min(start + size, length)) for start in range(0, length, size)]


def _mask(segments_BS: jax.Array, start: int, end: int) -> jax.Array:
    """[B, 1, end - start, end]: which of the first `end` positions the block's queries see."""
    same = segments_BS[:, None, start:end, None] == segments_BS[:, None, None, :end]
    return same & (jnp.arange(end) <= jnp.arange(start, end)[:, None])


def _heads_first(a_BSHN: jax.Array, kv_heads: int) -> jax.Array:
    """[B, K, G, S, N]: once as all products over heads want it, for XLA would do so for each of them."""
    rows, length, heads, width = a_BSHN.shape
    return a_BSHN.reshape(rows, length, kv_heads, heads // kv_heads, width).transpose(0, 2, 3, 1, 4)


def _heads_last(a_BKGSN: jax.Array) -> jax.Array:
    rows, kv_heads, queries, length, width = a_BKGSN.shape
    return a_BKGSN.transpose(0, 3, 1, 2, 4).reshape(rows, length, kv_heads * queries, width)


def _one_block(scores_BKGST: jax.Array, v_BKTN: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(what the queries read, [B, K, G, S, N]; the logarithm of the sum of exp(scores), [B, K, G, S, 1])."""
    largest_BKGS1 = jnp.max(scores_BKGST, axis=-1, keepdims=True)
    exp_BKGST = jnp.exp(scores_BKGST - largest_BKGS1)
    sum_BKGS1 = jnp.sum(exp_BKGST, axis=-1, keepdims=True)
    mixed_BKGSN = _product("bkgst,bktn->bkgsn", exp_BKGST.astype(v_BKTN.dtype), v_BKTN) / sum_BKGS1
    return mixed_BKGSN.astype(v_BKTN.dtype), largest_BKGS1 + jnp.log(sum_BKGS1)


def _all_scores(q_BKGSN: jax.Array, k_BKTN: jax.Array, mask_B1ST: jax.Array) -> jax.Array:
    return _scores(_product("bkgsn,bktn->bkgst", q_BKGSN, k_BKTN), q_BKGSN.shape[-1], mask_B1ST)


def _scores(products_BKGST: jax.Array, width: int, mask_B1ST: jax.Array) -> jax.Array:
    return jnp.where(mask_B1ST[:, :, None], products_BKGST * width**-0.5, HIDDEN)


def _product(equation: str, a: jax.Array, b: jax.Array) -> jax.Array:
    """An einsum whose sums and result are in float32."""
    if a.dtype == jnp.float16 and jax.default_backend() == "cpu":  # which has no such product of float16
        a, b = a.astype(jnp.float32), b.astype(jnp.float32)
    return jnp.einsum(equation, a, b, preferred_element_type=jnp.float32)
