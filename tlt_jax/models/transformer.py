"""A decoder-only transformer of Llama's architecture, as a pytree and pure functions over it.

RMSNorm (Zhang & Sennrich 2019), rotary embedding (Su et al. 2021), grouped-query attention (Ainslie et al. 2023),
SwiGLU (Shazeer 2020). Layers are stacked on a leading axis: training scans over them. Decoding has its own view of the
same parameters (`models/decode_view.py`) and shares `block`.

Shape suffixes: B batch, S sequence, T cache length, D width, H heads, K key/value heads, N width of a head, F hidden,
V vocabulary, L layers.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from tlt_jax.models.attention import causal_attention
from tlt_jax.models.declare import Declare
from tlt_jax.models.products import KEPT, linear, swiglu
from tlt_jax.parallel.sharding import constrain


@dataclass(frozen=True)
class ModelShape:
    """All that decides the model's arrays and arithmetic. Hashable: it rides in the module as a static attribute."""

    vocab: int
    width: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    hidden: int
    exit_layer: int
    exit_rank: int
    rope_theta: float = 10_000.0
    norm_eps: float = 1e-5
    tied: bool = True


class Attention(nnx.Module):
    """Projections of grouped-query attention."""

    def __init__(self, s: ModelShape, declare: Declare):
        std = s.width**-0.5
        hf = "model.layers.{layer}.self_attn."
        kv = ((s.width, s.kv_heads, s.head_dim), ("embed", "kv_heads", "head_dim"), std)
        self.query = declare(
            "query", (s.width, s.heads, s.head_dim), ("embed", "heads", "head_dim"), std, hf + "q_proj.weight", True
        )
        self.key = declare("key", *kv, hf + "k_proj.weight", True)
        self.value = declare("value", *kv, hf + "v_proj.weight", True)
        self.out = declare(
            "out",
            (s.heads, s.head_dim, s.width),
            ("heads", "head_dim", "embed"),
            (s.heads * s.head_dim * 2 * s.layers) ** -0.5,
            hf + "o_proj.weight",
            True,
        )


class MLP(nnx.Module):
    """Projections of the gated MLP."""

    def __init__(self, s: ModelShape, declare: Declare):
        up = ((s.width, s.hidden), ("embed", "hidden"), s.width**-0.5)
        hf = "model.layers.{layer}.mlp."
        self.gate = declare("gate", *up, hf + "gate_proj.weight", True)
        self.up = declare("up", *up, hf + "up_proj.weight", True)
        self.down = declare(
            "down",
            (s.hidden, s.width),
            ("hidden", "embed"),
            (s.hidden * 2 * s.layers) ** -0.5,
            hf + "down_proj.weight",
            True,
        )


class Block(nnx.Module):
    """One layer's arrays."""

    def __init__(self, s: ModelShape, declare: Declare):
        self.shape = s
        self.attention_norm = declare(
            "attention_norm", (s.width,), ("embed",), "ones", "model.layers.{layer}.input_layernorm.weight"
        )
        self.attention = Attention(s, declare.into("attention"))
        self.mlp_norm = declare(
            "mlp_norm", (s.width,), ("embed",), "ones", "model.layers.{layer}.post_attention_layernorm.weight"
        )
        self.mlp = MLP(s, declare.into("mlp"))


class Transformer(nnx.Module):
    """The parameters. `head` is absent where the embedding is tied."""

    def __init__(self, s: ModelShape, declare: Declare):
        self.shape = s
        self.embedding = declare("embedding", (s.vocab, s.width), ("vocab", "embed"), 0.02, "model.embed_tokens.weight")
        self.layers = Block(s, declare.into("layers", stack=s.layers))
        self.final_norm = declare("final_norm", (s.width,), ("embed",), "ones", "model.norm.weight")
        if not s.tied:
            self.head = declare("head", (s.width, s.vocab), ("embed", "vocab"), s.width**-0.5, "lm_head.weight", True)


def cast(tree: Any, dtype: jnp.dtype) -> Any:
    """The tree with its arrays in the compute type."""
    return jax.tree.map(lambda a: a.astype(dtype), tree)


def rms_norm(x: jax.Array, scale: jax.Array, eps: float) -> jax.Array:
    """x / sqrt(mean(x^2) + eps) * scale over the last axis, in float32, back in x's type."""
    x32 = x.astype(jnp.float32)
    x32 = x32 * jax.lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + eps)
    return (x32 * scale.astype(jnp.float32)).astype(x.dtype)


def rotary(positions_BS: jax.Array, head_dim: int, theta: float) -> tuple[jax.Array, jax.Array]:
    """(cos, sin), each [B, S, 1, N/2] in float32, of the rotary embedding's angles."""
    frequencies = theta ** (-jnp.arange(0, head_dim, 2, dtype=jnp.float32) / head_dim)
    angles = positions_BS.astype(jnp.float32)[..., None, None] * frequencies
    return jnp.cos(angles), jnp.sin(angles)


def rotate(x_BSHN: jax.Array, cos_sin: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Rotates the halves of each head by their angles (the layout of Hugging Face's Llama)."""
    cos, sin = cos_sin
    low, high = jnp.split(x_BSHN.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([low * cos - high * sin, high * cos + low * sin], axis=-1).astype(x_BSHN.dtype)


def block(
    layer: Block,
    x_BSD: jax.Array,
    cos_sin: tuple[jax.Array, jax.Array],
    attend: Callable[[jax.Array, jax.Array, jax.Array], tuple[jax.Array, Any]],
) -> tuple[jax.Array, Any]:
    """One layer. `attend(q, k, v)` gives the mixed values [B, S, H, N] and what it keeps (a cache), also returned."""
    eps = layer.shape.norm_eps
    with jax.named_scope("attention"):
        y_BSD = rms_norm(x_BSD, layer.attention_norm, eps)
        q_BSHN = rotate(linear(y_BSD, layer.attention.query), cos_sin)
        k_BSKN = rotate(linear(y_BSD, layer.attention.key), cos_sin)
        mixed_BSHN, kept = attend(q_BSHN, k_BSKN, linear(y_BSD, layer.attention.value))
        x_BSD = x_BSD + linear(mixed_BSHN, layer.attention.out, 2)
    with jax.named_scope("mlp"):
        y_BSD = rms_norm(x_BSD, layer.mlp_norm, eps)
        gated_BSF = swiglu(linear(y_BSD, layer.mlp.gate), linear(y_BSD, layer.mlp.up))
        x_BSD = x_BSD + linear(gated_BSF, layer.mlp.down)
    return constrain(x_BSD, "batch", None, None), kept


def look_up(embedding_VD: jax.Array, tokens_BS: jax.Array) -> jax.Array:
    """The embeddings [B, S, D] of the tokens. The table is put together over the width first, as every weight is:
    split there, the compiler would copy the activations to every device."""
    return constrain(constrain(embedding_VD, "vocab", None)[tokens_BS], "batch", None, None)


def hidden_states(
    model: Transformer,
    tokens_BS: jax.Array,
    segments_BS: jax.Array,
    positions_BS: jax.Array,
    *,
    dtype: jnp.dtype,
    remat: str = "none",
) -> tuple[jax.Array, jax.Array]:
    """(x_exit, x_final), each [B, S, D]: what leaves layer `exit_layer`, and the last layer, before any norm.

    Tokens attend backwards within their own segment; segment 0 is padding, whose outputs mean nothing. `remat` says
    what the backward pass recomputes: "none"; "dots" (all but matrix products); "full" (each layer).
    """
    s = model.shape
    cos_sin = rotary(positions_BS, s.head_dim, s.rope_theta)

    def attend(q, k, v):
        return causal_attention(q, k, v, segments_BS), None

    def layer_step(x_BSD, layer):
        return block(cast(layer, dtype), x_BSD, cos_sin, attend)

    layer_step = _rematerialised(layer_step, remat)
    with jax.named_scope("embed"):
        x_BSD = look_up(model.embedding.astype(dtype), tokens_BS)
    early, late = (
        jax.tree.map(partial(_part, rows), model.layers) for rows in (slice(s.exit_layer), slice(s.exit_layer, None))
    )
    x_exit_BSD, _ = jax.lax.scan(layer_step, x_BSD, early)
    x_BSD, _ = jax.lax.scan(layer_step, x_exit_BSD, late)
    return x_exit_BSD, x_BSD


def _part(rows: slice, a: jax.Array) -> jax.Array:
    return a[rows]


def _rematerialised(function: Callable, policy: str) -> Callable:
    if policy == "none":
        return function
    policies = jax.checkpoint_policies
    kept = policies.save_only_these_names(KEPT) if policy == "dots" else policies.nothing_saveable
    return jax.checkpoint(function, policy=kept, prevent_cse=False)


def head_matrix(model: Any) -> jax.Array:
    """The output head [D, V] of a model, or of its decode view, which has its own."""
    return model.embedding.T if model.shape.tied else model.head


def logits(model: Any, x_BSD: jax.Array) -> jax.Array:
    """Next-token logits [B, S, V] in float32 from what leaves the last layer."""
    return project(model, normed(model, x_BSD))


def normed(model: Any, x_BSD: jax.Array) -> jax.Array:
    """What leaves the last layer, as the head sees it [B, S, D]."""
    return rms_norm(x_BSD, model.final_norm, model.shape.norm_eps)


def project(model: Any, y_BSD: jax.Array) -> jax.Array:
    """Logits in float32 from states that are already normalised."""
    with jax.named_scope("head"):
        head_DV = head_matrix(model).astype(y_BSD.dtype)
        return constrain(
            jnp.einsum("bsd,dv->bsv", y_BSD, head_DV, preferred_element_type=jnp.float32), "batch", None, "vocab"
        )
