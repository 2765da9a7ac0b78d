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


def mixed_values(q_BSHN: jax.Array, k_BTKN: jax.Array, v_BTKN: jax.Array, mask_B1ST: jax.Array) -> jax.Array:
    """What each query reads, [B, S, H, N], where the mask is true; each query has a key that it sees."""
    return _one_block(_grouped(q_BSHN, k_BTKN), k_BTKN, v_BTKN, mask_B1ST)[0].reshape(q_BSHN.shape)


@jax.custom_vjp
def causal_attention(q_BSHN: jax.Array, k_BSKN: jax.Array, v_BSKN: jax.Array, segments_BS: jax.Array) -> jax.Array:
    """What each position reads, [B, S, H, N], from those of its own segment up to itself."""
    return _forward(q_BSHN, k_BSKN, v_BSKN, segments_BS)[0]


def _forward(q_BSHN, k_BSKN, v_BSKN, segments_BS):
    q_BSKGN = _grouped(q_BSHN, k_BSKN)
    blocks = [
        _one_block(q_BSKGN[:, start:end], k_BSKN[:, :end], v_BSKN[:, :end], _mask(segments_BS, start, end))
        for start, end in _blocks(q_BSHN.shape[1])
    ]
    mixed_BSKGN = checkpoint_name(jnp.concatenate([mixed for mixed, _ in blocks], axis=1), KEPT)
    log_sums = [checkpoint_name(log_sum_BKGS1, KEPT) for _, log_sum_BKGS1 in blocks]
    return mixed_BSKGN.reshape(q_BSHN.shape), (q_BSHN, k_BSKN, v_BSKN, segments_BS, mixed_BSKGN, log_sums)


def _backward(kept, d_BSHN):
    """With P the probabilities, O = P V and D = rowsum(dO * O): dV = P^T dO, dS = P * (dO V^T - D), dQ = dS K and
    dK = dS^T Q, both times the scale (FlashAttention-2, section 2.2)."""
    q_BSHN, k_BSKN, v_BSKN, segments_BS, mixed_BSKGN, log_sums = kept
    q_BSKGN, d_BSKGN = _grouped(q_BSHN, k_BSKN), _grouped(d_BSHN, k_BSKN)
    along_BSKG = jnp.sum(d_BSKGN.astype(jnp.float32) * mixed_BSKGN.astype(jnp.float32), axis=-1)
    along_BKGS1 = jnp.moveaxis(along_BSKG, 1, 3)[..., None]
    scale = q_BSHN.shape[-1] ** -0.5
    dq, dk_BSKN, dv_BSKN = [], jnp.zeros(k_BSKN.shape, jnp.float32), jnp.zeros(v_BSKN.shape, jnp.float32)
    for (start, end), log_sum_BKGS1 in zip(_blocks(q_BSHN.shape[1]), log_sums, strict=True):
        q, d, k, v = q_BSKGN[:, start:end], d_BSKGN[:, start:end], k_BSKN[:, :end], v_BSKN[:, :end]
        p_BKGST = jnp.exp(_scores(q, k, _mask(segments_BS, start, end)) - log_sum_BKGS1)
        dp_BKGST = _product("bskgn,btkn->bkgst", d, v)
        ds_BKGST = (p_BKGST * (dp_BKGST - along_BKGS1[..., start:end, :]) * scale).astype(q.dtype)
        dq.append(_product("bkgst,btkn->bskgn", ds_BKGST, k))
        dk_BSKN = dk_BSKN.at[:, :end].add(_product("bkgst,bskgn->btkn", ds_BKGST, q))
        dv_BSKN = dv_BSKN.at[:, :end].add(_product("bkgst,bskgn->btkn", p_BKGST.astype(v.dtype), d))
    dq_BSHN = jnp.concatenate(dq, axis=1).reshape(q_BSHN.shape)
    return dq_BSHN.astype(q_BSHN.dtype), dk_BSKN.astype(k_BSKN.dtype), dv_BSKN.astype(v_BSKN.dtype), None


causal_attention.defvjp(_forward, _backward)


def _blocks(length: int) -> list[tuple[int, int]]:
    """(start, end) of each block of queries: few, for each is compiled by itself, and none needlessly small."""
    size = max(SMALLEST_BLOCK, -(-length // MOST_BLOCKS))
    return [(start, min(start + size, length)) for start in range(0, length, size)]


def _mask(segments_BS: jax.Array, start: int, end: int) -> jax.Array:
    """[B, 1, end - start, end]: which of the first `end` positions the block's queries see."""
    same = segments_BS[:, None, start:end, None] == segments_BS[:, None, None, :end]
    return same & (jnp.arange(end) <= jnp.arange(start, end)[:, None])


def _grouped(q_BSHN: jax.Array, k_BTKN: jax.Array) -> jax.Array:
    rows, length, heads, width = q_BSHN.shape
    kv_heads = k_BTKN.shape[2]
    return q_BSHN.reshape(rows, length, kv_heads, heads // kv_heads, width)


def _one_block(q_BSKGN, k_BTKN, v_BTKN, mask_B1ST) -> tuple[jax.Array, jax.Array]:
    """(what the queries read, [B, S, K, G, N]; the logarithm of the sum of exp(scores), [B, K, G, S, 1])."""
    scores_BKGST = _scores(q_BSKGN, k_BTKN, mask_B1ST)
    largest_BKGS1 = jnp.max(scores_BKGST, axis=-1, keepdims=True)
    exp_BKGST = jnp.exp(scores_BKGST - largest_BKGS1)
    sum_BKGS1 = jnp.sum(exp_BKGST, axis=-1, keepdims=True)
    mixed_BSKGN = _product("bkgst,btkn->bskgn", exp_BKGST.astype(v_BTKN.dtype), v_BTKN)
    mixed_BSKGN /= jnp.moveaxis(sum_BKGS1, 3, 1)
    return mixed_BSKGN.astype(q_BSKGN.dtype), largest_BKGS1 + jnp.log(sum_BKGS1)


def _scores(q_BSKGN: jax.Array, k_BTKN: jax.Array, mask_B1ST: jax.Array) -> jax.Array:
    scores_BKGST = _product("bskgn,btkn->bkgst", q_BSKGN, k_BTKN) * q_BSKGN.shape[-1] ** -0.5
    return jnp.where(mask_B1ST[:, :, None], scores_BKGST, HIDDEN)


def _product(equation: str, a: jax.Array, b: jax.Array) -> jax.Array:
    """An einsum whose sums and result are in float32."""
    if a.dtype == jnp.float16 and jax.default_backend() == "cpu":  # which has no such product of float16
        a, b = a.astype(jnp.float32), b.astype(jnp.float32)
    return jnp.einsum(equation, a, b, preferred_element_type=jnp.float32)
