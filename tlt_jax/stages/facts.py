"""What the report and the log say of a run before its first step."""

import logging
import platform
from datetime import datetime
from pathlib import Path
from typing import Any

import jax
import numpy as np

from tlt_jax import __version__
from tlt_jax.config import Config
from tlt_jax.config.schema import SpeculationConfig
from tlt_jax.data import Corpus

log = logging.getLogger("tlt_jax")

# Counts of the data's summary, and how the log calls them.
LEFT_OUT = {
    "duplicates": "duplicate documents",
    "skipped": "unusable documents",
    "not_chosen": "documents beyond data.max_documents",
    "task_duplicates": "tasks seen before",
    "task_bad_lines": "bad lines of tasks",
    "task_empty": "tasks without text on both sides",
    "dropped_empty_prompts": "tasks with an empty prompt",
    "dropped_long_prompts": "tasks with too long a prompt",
    "dropped_long_completions": "tasks with too long a completion",
}


def facts_of(config: Config, mesh: jax.sharding.Mesh, dtype: np.dtype, corpus: Corpus) -> dict[str, Any]:
    """What ran on what: the "facts" of results.json and of the report."""
    device = jax.devices()[0]
    return {
        "device": device.device_kind,
        "platform": device.platform,
        "device_count": jax.device_count(),
        **({"processes": jax.process_count()} if jax.process_count() > 1 else {}),
        "mesh": " x ".join(f"{axis} {size}" for axis, size in mesh.shape.items()),
        "compute_dtype": str(dtype),
        "versions": _versions(),
        "python": platform.python_version(),
        "started": datetime.now().astimezone().isoformat(timespec="seconds"),
        "seed": config.run.seed,
        "drafter": config.speculation.drafter,
        "draft_length": config.speculation.draft_length,
        "verification": verification_in_words(config.speculation),
        "evaluation_decoding": f"sampled at temperature {config.sampling.temperature:g}",
        "budget": f"{config.budget.total:g} {config.budget.unit}",
        "data": _data_facts(corpus),
    }


def verification_in_words(config: SpeculationConfig) -> str:
    """The rule by which drafts stand, and whether it is lossless."""
    if config.verification != "lenient":
        return f"{config.verification}, lossless"
    return f"lenient, LOSSY: accept_threshold {config.accept_threshold:g}" + ", by entropy" * config.accept_by_entropy


def _data_facts(corpus: Corpus) -> dict[str, Any]:
    """What a reader of the report wants to know of the data; the log holds every count."""
    data = corpus.summary
    return {
        "documents": data["files"],
        "documents_held_out": data["held_out_files"],
        "training_tokens": data["train_tokens"],
        "tokens_held_out": data["held_out_tokens"],
        "bytes_a_token": corpus.bytes_per_token,
        "vocabulary": data["vocab_size"],
        "tasks": data["train_tasks"],
        "tasks_held_out": data["held_out_tasks"],
        **({"left_out": _left_out(data)} if _left_out(data) else {}),
    }


def _left_out(data: dict[str, Any]) -> str:
    return ", ".join(f"{data[name]} {words}" for name, words in LEFT_OUT.items() if data.get(name))


def _versions() -> dict[str, str]:
    from importlib.metadata import version

    names = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "numpy")
    return {"tlt_jax": __version__, **{name: version(name) for name in names}}


def announce(folder: Path, facts: dict[str, Any], corpus: Corpus) -> None:
    """Logs where the run is, on what it runs, and what its data are."""
    data = corpus.summary
    log.info("run directory: %s", folder)
    log.info("%d x %s, mesh %s, %s", *(facts[name] for name in ("device_count", "device", "mesh", "compute_dtype")))
    log.info(
        "data: %d documents, %d training tokens, %.2f bytes a token, %d tasks (%d held out)%s",
        data["files"],
        data["train_tokens"],
        corpus.bytes_per_token,
        data["train_tasks"],
        data["held_out_tasks"],
        ", from the cache" if data["cached"] else "",
    )
    if _left_out(data):
        log.info("left out: %s", _left_out(data))
    log.debug("data: %s", data)
