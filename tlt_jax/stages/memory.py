"""How much memory the arrays of a run take, before any is made."""

import math
import os

import jax
import numpy as np

from tlt_jax.config import Config, ConfigError
from tlt_jax.models.declare import table
from tlt_jax.models.transformer import ModelShape, Transformer

MOMENTS = {
    "adamw": 2,
    "lion": 1,
    "muon": 2,
}  # muon: one for matrices, two for what AdamW handles; the larger is planned


def parameters(shape: ModelShape) -> int:
    """How many numbers a model of this shape holds."""
    return sum(math.prod(spec.shape) for spec in table(lambda d: Transformer(shape, d)).values())


def memory(config: Config, shape: ModelShape, mesh: jax.sharding.Mesh, dtype: np.dtype) -> dict[str, float]:
    """Bytes on each device of what stays there, by kind; activations come on top."""
    count = parameters(shape) / (mesh.shape["fsdp"] * mesh.shape["tensor"])
    rows = mesh.shape["data"] * mesh.shape["fsdp"]
    optimizer = {
        "pretrain": config.pretrain.optimizer,
        "finetune": config.finetune.policy.optimizer,
        "align": config.align.ppo.optimizer,
    }
    moments = max(MOMENTS[optimizer[stage].name] for stage in config.stages)
    frozen = 2 if "align" in config.stages else 1 if "finetune" in config.stages else 0
    positions = config.data.tasks.max_prompt_tokens + config.data.tasks.max_completion_tokens
    width = 2 * shape.layers * shape.kv_heads * shape.head_dim / mesh.shape["tensor"]
    largest = max(config.pretrain.batch_size if "pretrain" in config.stages else 0, config.finetune.warmup.batch_size)
    return {
        "weights, gradients and optimiser": 4 * count * (2 + moments),
        "frozen models": 4 * count * frozen,
        "decode view": dtype.itemsize * count,
        "cache of all slots": width * config.speculation.slots / rows * positions * dtype.itemsize,
        "a batch": 20.0 * largest / rows * config.data.context_length,
    }


def in_words(sizes: dict[str, float]) -> str:
    """The kinds with their MiB."""
    said = ", ".join(f"{name} {size / 2**20:,.1f} MiB" for name, size in sizes.items() if size)
    return f"{said} (activations come on top)"


def check_memory(sizes: dict[str, float]) -> None:
    """Raises ConfigError if `sizes` on every device of this host are more than there is: what cannot be allocated may
    be waited for without end."""
    device = jax.local_devices()[0]
    limit = (device.memory_stats() or {}).get("bytes_limit") if device.platform != "cpu" else None
    here = 1 if limit else jax.local_device_count()  # simulated devices share the host's memory
    limit = limit or os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if sum(sizes.values()) * here > limit:
        raise ConfigError(
            f"the run needs more than the {limit / 2**30:,.1f} GiB that are here: {in_words(sizes)}; expected a smaller"
            " model or batch, fewer `speculation.slots`, or more devices"
        )
