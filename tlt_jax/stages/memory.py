"""How much memory the arrays of a run take, before any is made."""

import math
import os
import resource
import sys
from collections.abc import Iterator
from typing import NamedTuple

import jax
import numpy as np

from tlt_jax.config import Config, ConfigError
from tlt_jax.config.stage_sections import OptimizerConfig
from tlt_jax.models.declare import table
from tlt_jax.models.eagle import Eagle
from tlt_jax.models.transformer import ModelShape, Transformer

MOMENTS = {
    "adamw": 2,
    "lion": 1,
    "muon": 2,
}  # muon: one for matrices, two for what AdamW handles; the larger is planned


def parameters(shape: ModelShape) -> int:
    """How many numbers a model of this shape holds."""
    return sum(math.prod(spec.shape) for spec in table(lambda d: Transformer(shape, d)).values())


def memory(
    config: Config, shape: ModelShape, mesh: jax.sharding.Mesh, dtype: np.dtype, draft: ModelShape | None = None
) -> dict[str, float]:
    """Bytes on each device of what stays there in the phase that needs most, by kind; activations come on top. `draft`
    is the draft model's shape, where it may draft."""
    parts = mesh.shape["fsdp"] * mesh.shape["tensor"]
    count = parameters(shape) / parts
    rows = mesh.shape["data"] * mesh.shape["fsdp"]
    positions = config.data.tasks.max_prompt_tokens + config.data.tasks.max_completion_tokens

    def viewed(s: ModelShape) -> float:
        own_head = s.vocab * s.width if s.tied else 0  # the view's is never tied
        return dtype.itemsize * (parameters(s) + own_head) / mesh.shape["tensor"]

    def cached(s: ModelShape) -> float:
        width = 2 * s.layers * s.kv_heads * s.head_dim / mesh.shape["tensor"]
        return width * config.speculation.slots / rows * positions * dtype.itemsize

    # In all phases: they complete prompts to be judged by.
    decoding = {"decode view": viewed(shape), "cache of all slots": cached(shape)}
    if draft is not None:
        moments = MOMENTS[config.speculation.optimizer.name]
        copies = 2 + moments if "distill" in config.stages else 1
        decoding["draft model"] = 4 * copies * parameters(draft) / parts + viewed(draft) + cached(draft)
    eagle = {}
    if config.speculation.with_eagle:
        own = sum(math.prod(spec.shape) for spec in table(lambda d: Eagle(shape, d)).values())
        one_layer = cached(shape) / shape.layers
        states = 2 * shape.width * config.speculation.slots / rows * positions * dtype.itemsize
        trained = 4 * own * (2 + MOMENTS[config.speculation.optimizer.name]) / mesh.shape["tensor"]
        eagle["eagle"] = trained + dtype.itemsize * own / mesh.shape["tensor"] + one_layer + states
    phases = [
        {
            "weights, gradients and optimiser": 4 * count * (2 + MOMENTS[phase.optimizer.name])
            if phase.optimizer
            else 0.0,
            "frozen models": 4 * count * phase.frozen,
            **decoding,
            **eagle,
            "a batch": 20.0 * phase.tokens / rows,
        }
        for phase in _phases(config, positions)
    ]
    return max(phases, key=lambda sizes: sum(sizes.values()))


class _Plan(NamedTuple):
    """What a phase holds: its optimiser's moments (None: it does not train the policy), models that it does not train,
    the tokens of an update."""

    optimizer: OptimizerConfig | None
    frozen: int
    tokens: int


def _phases(config: Config, positions: int) -> Iterator[_Plan]:
    context = config.data.context_length
    if "pretrain" in config.stages:
        yield _Plan(config.pretrain.optimizer, 0, config.pretrain.batch_size * context)
    if "finetune" in config.stages:
        warmup, policy = config.finetune.warmup, config.finetune.policy
        yield _Plan(warmup.optimizer, 0, warmup.batch_size * context)
        yield _Plan(policy.optimizer, 1, policy.prompts * policy.group_size // policy.minibatches * positions)
    if "align" in config.stages:
        reward, ppo = config.align.reward_model, config.align.ppo
        yield _Plan(reward.optimizer, 1, 2 * reward.batch_size * positions)  # beside it the policy waits
        yield _Plan(ppo.optimizer, 2, ppo.prompts // ppo.minibatches * positions)  # the reference, the reward model
    if "distill" in config.stages:
        yield _Plan(None, 1, config.distill.prompts // config.distill.minibatches * positions)


def in_words(sizes: dict[str, float]) -> str:
    """The kinds with their MiB."""
    said = ", ".join(f"{name} {size / 2**20:,.1f} MiB" for name, size in sizes.items() if size)
    return f"{said} (activations come on top)"


def memory_limit() -> float:
    """Bytes that each device of this process may take: its own limit, or where it has none, as the CPU, its part of
    the host's memory, which simulated devices share."""
    device = jax.local_devices()[0]
    limit = (device.memory_stats() or {}).get("bytes_limit") if device.platform != "cpu" else None
    return float(limit or os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / jax.local_device_count())


def peak_memory() -> float:
    """The most bytes that were in use at once on a device of this process, or its part of the process's memory where
    devices do not count (the CPU)."""
    counted = [(device.memory_stats() or {}).get("peak_bytes_in_use", 0) for device in jax.local_devices()]
    if max(counted):
        return float(max(counted))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    return peak / jax.local_device_count()


def check_memory(sizes: dict[str, float]) -> None:
    """Raises ConfigError if `sizes` on every device of this host are more than there is: what cannot be allocated may
    be waited for without end."""
    limit = memory_limit()
    if sum(sizes.values()) > limit:
        raise ConfigError(
            f"the run needs more than the {limit / 2**30:,.1f} GiB that are here for a device: {in_words(sizes)};"
            " expected a smaller model or batch, fewer `speculation.slots`, or more devices"
        )
