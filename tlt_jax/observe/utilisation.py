"""How much of the devices' peak the model's own arithmetic reaches: model FLOPs utilisation, `train/mfu`."""

import time

import jax
import jax.numpy as jnp
import numpy as np

from tlt_jax.models.transformer import ModelShape

# FLOP/s of one chip in dense matmuls: in bfloat16, and in float32 as JAX computes it by default there: TF32 on GPUs,
# one bfloat16 pass on TPUs. From the vendors' data sheets (NVIDIA A100, H100, H200: without sparsity; Google Cloud's
# TPU pages: "peak compute per chip, bf16"). By what a device's kind holds; the first that fits counts.
PEAKS = {
    "H100 PCIe": (756e12, 378e12),
    "H100 NVL": (835e12, 417e12),
    "H100": (989e12, 494e12),
    "H200": (989e12, 494e12),
    "A100": (312e12, 156e12),
    "TPU v6": (918e12, 918e12),  # v6e, which also calls itself v6 lite
    "TPU v5 lite": (197e12, 197e12),
    "TPU v5e": (197e12, 197e12),
    "TPU v5": (459e12, 459e12),  # v5p
    "TPU v4": (275e12, 275e12),
}
MEASURING = 0.1  # seconds at most that a matmul is repeated for


def training_flops(shape: ModelShape, context: int) -> float:
    """FLOPs a token of a forward and a backward pass: 6 N + 12 L H Q T (Chowdhery et al. 2022, PaLM, appendix B).

    N are the parameters that multiply: the projections of L layers and the output head, tied or not, without norms,
    the embedding's look-up and the drafter's exit. The second term is attention's, H heads of width Q over T =
    `context` positions, all counted as if none were masked. What is computed again for want of memory does not count.
    """
    s = shape
    attention = 2 * s.width * s.heads * s.head_dim + 2 * s.width * s.kv_heads * s.head_dim
    multiply = s.layers * (attention + 3 * s.width * s.hidden) + s.width * s.vocab
    return 6.0 * multiply + 12.0 * s.layers * s.heads * s.head_dim * context


def known_peak(kind: str, dtype: np.dtype) -> float | None:
    """FLOP/s of one device of this kind by its vendor's figures; None where they are not known here."""
    if np.dtype(dtype) not in (np.dtype(jnp.bfloat16), np.dtype(np.float32)):
        return None
    column = 0 if np.dtype(dtype) == jnp.bfloat16 else 1
    return next((peaks[column] for name, peaks in PEAKS.items() if name in kind), None)


def peak_flops(dtype: np.dtype) -> tuple[float, str]:
    """(FLOP/s of all devices of the run, a sentence on where that is from): the vendor's, else measured by a matmul."""
    kind = jax.devices()[0].device_kind
    peak = known_peak(kind, dtype)
    if peak is not None:
        return peak * jax.device_count(), f"{peak / 1e12:,.0f} TFLOP/s a device in {dtype}, its vendor's figure"
    measured = _measured_peak(dtype) * jax.process_count()
    return measured, f"{measured / 1e9:,.0f} GFLOP/s in all in {dtype}, measured by a bare matmul at the start"


def _measured_peak(dtype: np.dtype) -> float:
    """FLOP/s of this process's devices in matmuls that all do at once: the best of several."""
    size = 512 if jax.default_backend() == "cpu" else 4096
    multiply = jax.jit(lambda matrix: matrix @ matrix)
    matrices = [jax.device_put(jnp.ones((size, size), dtype), device) for device in jax.local_devices()]
    jax.block_until_ready([multiply(matrix) for matrix in matrices])  # compiles
    best, started = float("inf"), time.monotonic()
    while best == float("inf") or time.monotonic() - started < MEASURING:
        before = time.monotonic()
        jax.block_until_ready([multiply(matrix) for matrix in matrices])
        best = min(best, time.monotonic() - before)
    return len(matrices) * 2.0 * size**3 / best
