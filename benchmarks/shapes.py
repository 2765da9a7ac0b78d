"""The models that benchmarks share: Llama's shape, tied."""

from tlt_jax.models.transformer import ModelShape

SIZES = {
    "6.5m": ModelShape(4096, 288, 6, 6, 6, 48, 768, 1, 8),
    "60m": ModelShape(32768, 512, 12, 8, 8, 64, 1408, 1, 8),
}


def matrix_products(shape: ModelShape, tokens: int) -> list[tuple[int, int, int]]:
    """(m, k, n) of the products with weights in a step over so many tokens, forward and backward. Attention's own are
    not among them: a small share."""
    inner, outer = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    layer = [(shape.width, inner), (shape.width, outer), (shape.width, outer), (inner, shape.width)]
    layer += [(shape.width, shape.hidden), (shape.width, shape.hidden), (shape.hidden, shape.width)]
    forward = [(tokens, k, n) for k, n in layer * shape.layers + [(shape.width, shape.vocab)]]
    backward = [product for m, k, n in forward for product in ((m, n, k), (k, m, n))]
    return forward + backward
