"""The code model that the benchmarks of decoding share: that of `configs/code_2m.yaml`, trained if it is not there."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np

from tlt_jax.config import load_config
from tlt_jax.config.schema import Config
from tlt_jax.data import Corpus, prepare
from tlt_jax.decode.controller import Controller
from tlt_jax.decode.drafters import DRAFTERS
from tlt_jax.decode.engine import Engine
from tlt_jax.decode.propose import Rules
from tlt_jax.decode.sampling import Draws
from tlt_jax.parallel.mesh import compute_dtype, make_mesh, set_up_devices
from tlt_jax.stages.models import Models, initial_models, model_shape

ROOT = Path(__file__).parents[1]
PROMPT = 64


def load(run: Path, devices: int = 1) -> tuple[Config, Models, Corpus]:
    """(config, models, data) of a run directory, on an accelerator, or so many simulated devices of a CPU; it is
    trained first where it is not there."""
    if not (run / "export").is_dir():
        command = [sys.executable, "-m", "tlt_jax.main", "--config", str(ROOT / "configs/code_2m.yaml")]
        subprocess.run([*command, f"run.name={run.name}", f"run.output_dir={run.parent}"], check=True)
    config = load_config(run / "config.yaml", [f"model.init_from={run}/export", f"device.cpu_devices={devices}"])
    set_up_devices(config.device)
    corpus = prepare(config.data, config.run.seed, str(run / "tokenizer.json"), lambda label, fraction: None)
    shape = model_shape(config.model, corpus.tokenizer.vocab_size)
    return config, initial_models(config, shape, make_mesh(config.device.mesh)), corpus


def engine(
    config: Config,
    models: Models,
    controller: Controller,
    slots: int,
    max_new: int,
    verification: str,
    draws: Draws,
    max_prompt: int = PROMPT,
    **options: Any,
) -> Engine:
    """An engine in which no token ends a sequence, so that its length is what the request says, and which looks for
    n-grams in the sequence alone: prompts come again from round to round, which history would know."""
    return Engine(
        models.policy.shape,
        make_mesh(config.device.mesh),
        slots=slots,
        max_prompt=max_prompt,
        max_new=max_new,
        eos=[models.policy.shape.vocab],
        controller=controller,
        dtype=compute_dtype(config.device),
        rules=Rules(
            draws=draws,
            verification=verification,
        ),
        block_verifies=config.speculation.block_verifies,
        draft_shape=models.draft_model and models.draft_model.shape,
        **options,
    )


def prompts(corpus: Corpus, count: int) -> list[np.ndarray]:
    """The first tokens of held-out rows that hold one document there."""
    rows = corpus.held_out
    whole = [row[:PROMPT] for row, parts in zip(rows.tokens, rows.segments, strict=True) if parts[0] == parts[PROMPT]]
    order = np.random.default_rng(0).permutation(len(whole))
    return [np.asarray(whole[i], np.int32) for i in order[:count]]


def drafters_of(models: Models) -> list[str]:
    """The drafters that these models have weights for, and those that need none."""
    absent = {name for name in ("eagle", "draft_model") if getattr(models, name) is None}
    return [name for name in DRAFTERS if name not in absent]
