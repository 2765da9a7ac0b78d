"""Model FLOPs and the devices' peak."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tlt_jax.models.transformer import ModelShape
from tlt_jax.observe.utilisation import known_peak, peak_flops, training_flops


@pytest.mark.parametrize("tied", [True, False])
def test_the_flops_of_training_by_hand(tied):
    """Width 8, 2 layers, 4 heads of 2, 2 key/value heads, 16 hidden, vocabulary 32, context 10."""
    shape = ModelShape(32, 8, 2, 4, 2, 2, 16, exit_layer=1, exit_rank=4, tied=tied)
    query_and_out, key_and_value, mlp, head = 2 * 8 * 4 * 2, 2 * 8 * 2 * 2, 3 * 8 * 16, 8 * 32
    multiply = 2 * (query_and_out + key_and_value + mlp) + head
    assert multiply == 1408
    assert training_flops(shape, 10) == 6 * 1408 + 12 * 2 * 4 * 2 * 10 == 10368


@pytest.mark.parametrize(
    ("kind", "bfloat16", "float32"),
    [
        ("NVIDIA A100-SXM4-80GB", 312e12, 156e12),
        ("NVIDIA H100 80GB HBM3", 989e12, 494e12),
        ("NVIDIA H100 PCIe", 756e12, 378e12),
        ("NVIDIA H200", 989e12, 494e12),
        ("TPU v4", 275e12, 275e12),
        ("TPU v5 lite", 197e12, 197e12),
        ("TPU v5p", 459e12, 459e12),
        ("TPU v6 lite", 918e12, 918e12),
        ("cpu", None, None),
    ],
)
def test_peaks_by_kind_and_type(kind, bfloat16, float32):
    assert (known_peak(kind, np.dtype(jnp.bfloat16)), known_peak(kind, np.dtype(np.float32))) == (bfloat16, float32)
    assert known_peak(kind, np.dtype(np.float16)) is None


def test_where_no_figure_is_known_the_peak_is_measured():
    peak, said = peak_flops(np.dtype(np.float32))
    assert "measured by a bare matmul" in said
    # What a matmul of another size reaches is of the same order.
    matrix = jnp.ones((1024, 1024))
    multiply = jax.jit(lambda a: a @ a).lower(matrix).compile()
    assert multiply.cost_analysis()["flops"] == pytest.approx(2 * 1024**3, rel=0.01)
    assert 1e8 < peak < 1e14
