"""The whole run, and each stage as a function: config in, final models and metrics out."""

import logging
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from tlt_jax.config import Config, ConfigError, load_config
from tlt_jax.config.device_sections import MeshConfig
from tlt_jax.models.hf import export
from tlt_jax.models.transformer import ModelShape
from tlt_jax.observe import write_report
from tlt_jax.parallel.mesh import make_mesh
from tlt_jax.stages.align import run_align
from tlt_jax.stages.distill import run_distill
from tlt_jax.stages.finetune import run_finetune
from tlt_jax.stages.loop import is_past
from tlt_jax.stages.memory import parameters
from tlt_jax.stages.models import (
    Models,
    by_role,
    checked_shape,
    host_copy,
    initial_models,
    model_shape,
    saved_models,
    tokenizer_path,
    with_drafters,
)
from tlt_jax.stages.opening import open_run
from tlt_jax.stages.pretrain import run_pretrain
from tlt_jax.stages.rollouts import Sampler
from tlt_jax.stages.run import Run, last_phase
from tlt_jax.text import Tokenizer, load_tokenizer

log = logging.getLogger("tlt_jax")

STAGES: dict[str, Callable[[Run, Sampler], None]] = {
    "pretrain": run_pretrain,
    "finetune": run_finetune,
    "align": run_align,
    "distill": run_distill,
}


@dataclass(frozen=True)
class StageResult:
    """What a stage leaves: the models, and its phases' records ("before", "after", "steps", "time", ...)."""

    models: Models
    phases: list[dict[str, Any]]


def run_all(config: Config) -> StageResult:
    """Runs the stages of `config` in one run directory, going on from what it holds; exports and reports at the end.

    Raises ConfigError for what the user can mend, Interrupted when a signal ended it (everything is saved).
    """
    with open_run(config) as run:
        try:
            if run.finished:
                assert run.document is not None
                _check_place(run, config.stages)
                run.begin(_finished_shape(run))
                run.warn_of_changes(run.shape)
                run.take_up_rows()
                run.recorded = True  # there is nothing to add
                log.info("this run is finished (%d steps); nothing is left to do; more needs a new run.name", run.step)
                models = saved_models(run.folder, run.mesh)
                if config.run.export and not (run.folder / "export").is_dir():
                    _export(run, models)
            else:
                models = _run_stages(run, config.stages, None)
                _finish(run, models)
            return StageResult(models, run.results)
        finally:
            _report(run)


def pretrain(config: Config, models: Models | None = None) -> StageResult:
    """Next-token training alone; `models` to start from, else `model.init_from`, else fresh ones."""
    return _run_one(config, "pretrain", models)


def finetune(config: Config, models: Models | None = None) -> StageResult:
    """Supervised warm-up and group-relative policy optimisation alone; starts as `pretrain` does."""
    return _run_one(config, "finetune", models)


def align(config: Config, models: Models | None = None) -> StageResult:
    """Reward model and PPO alone; starts as `pretrain` does."""
    return _run_one(config, "align", models)


def distill(config: Config, models: Models | None = None) -> StageResult:
    """The drafters alone, on completions of a policy that stays as it is; starts as `pretrain` does."""
    return _run_one(config, "distill", models)


def export_run(run_dir: Path, folder: Path) -> None:
    """Writes the model of a run directory's newest checkpoint as a Hugging Face directory. Raises ConfigError."""
    if not (run_dir / "config.yaml").is_file():
        raise ConfigError(f"{str(run_dir)!r}: no run here (expected a folder with config.yaml and checkpoints)")
    config = load_config(run_dir / "config.yaml")
    tokenizer = load_tokenizer(run_dir / "tokenizer.json")
    models = saved_models(run_dir, make_mesh(MeshConfig()))
    _write(folder, models, _host_copies(models), tokenizer, config.data.context_length)


def _run_one(config: Config, stage: str, models: Models | None) -> StageResult:
    if stage not in config.stages:
        raise ConfigError(f"`stages` is {config.stages}; expected {stage!r} among them")
    with open_run(config) as run:
        try:
            models = _run_stages(run, [stage], models)
            if stage == config.stages[-1]:
                _finish(run, models)
            elif run.recorded:
                run.write_results(ended=True)
        finally:
            _report(run)
        return StageResult(models, [r for r in run.results if r["stage"] == stage])


def _run_stages(run: Run, stages: Sequence[str], models: Models | None) -> Models:
    _check_place(run, stages)
    _check_tasks(run, stages)
    _take_first_models(run, stages, models)
    run.facts["parameters"] = parameters(run.shape)
    sampler = Sampler(run, run.shape)
    for stage in stages:
        if not is_past(run, *last_phase(stage)):
            STAGES[stage](run, sampler)
    return run.take_models()


def _finished_shape(run: Run) -> ModelShape:
    """The model's shape by the config; by the checkpoint where it comes from a place that may be gone by now."""
    assert run.document is not None
    if run.config.model.init_from is not None:
        return ModelShape(**run.document["shape"])
    return model_shape(run.config.model, run.corpus.tokenizer.vocab_size)


def _say_what_is_odd(run: Run, stages: Sequence[str], shape: ModelShape) -> None:
    """Warns of what a config may not have meant."""
    model = run.config.model
    if model.init_from is None and stages[0] != "pretrain" and run.document is None:
        log.warning("%s starts from a fresh model: `model.init_from` names none", stages[0])
    unused = [
        f"model.{name} ({getattr(model, name)}, there {value})"
        for name, value in asdict(shape).items()
        if name in model.model_fields_set and getattr(model, name) != value
    ]
    if model.init_from is not None and unused:
        log.warning("`model.init_from` decides the model's shape; not used: %s", ", ".join(unused))


def _take_first_models(run: Run, stages: Sequence[str], models: Models | None) -> None:
    """Begins the run with what the first of `stages` starts from: `models`, else those of an earlier stage that this
    run directory holds, else those that the config names. None are made where the run goes on within `stages`: the
    phase that it stands in restores them."""
    given = models is not None
    if models is None and run.document and run.document["stage"] not in stages:
        models = saved_models(run.folder, run.mesh)
    if models is not None:
        shape, models = models.policy.shape, with_drafters(run.config, models, run.mesh)
    else:
        _warn_of_another_tokenizer(run)
        shape = checked_shape(run.config, run.corpus.tokenizer.vocab_size, run.mesh)
    if not given:
        _say_what_is_odd(run, stages, shape)
    run.begin(shape)
    if run.document is None or run.document["stage"] not in stages:
        run.models = models or initial_models(run.config, shape, run.mesh)


def _warn_of_another_tokenizer(run: Run) -> None:
    """A model means nothing with another tokenizer's ids; a changed file of the same vocabulary is the user's right."""
    config = run.config
    path = tokenizer_path(config.model)
    if not (path and config.data.tokenizer.path and Path(path).is_file()):
        return
    if load_tokenizer(path).vocabulary != run.corpus.tokenizer.vocabulary:
        log.warning(
            "`data.tokenizer.path` has another vocabulary than the tokenizer of `model.init_from` (%s):"
            " to that model its ids are other words",
            path,
        )


def _check_place(run: Run, stages: Sequence[str]) -> None:
    """Raises ConfigError where the run directory stands behind `stages` or in the middle of another stage, or began
    with other data: a model means nothing with another tokenizer's ids."""
    document = run.document
    if document and document["data"] != run.corpus.summary["digest"]:
        raise ConfigError(
            f"the run in {str(run.folder)!r} began with other data (`data.*`, `run.seed`, the files, or the versions of"
            " Python or tokenizers differ); expected the same, or a new run.name"
        )
    if document is None or document["stage"] in stages:
        return
    if is_past(run, *last_phase(stages[-1])):
        raise ConfigError(f"the run in {str(run.folder)!r} is already past {stages[-1]!r}; expected a new run.name")
    if not document["done"] or (document["stage"], document["phase"]) != last_phase(document["stage"]):
        raise ConfigError(
            f"the run in {str(run.folder)!r} stands in the middle of {document['stage']!r};"
            f" expected that stage in `stages` ({list(stages)}), or a new run.name"
        )


def _check_tasks(run: Run, stages: Sequence[str]) -> None:
    """Raises ConfigError, before anything is trained, if a later stage would find no tasks."""
    without = {"pretrain"} | ({"distill"} if run.config.distill.source == "text" else set())
    needing = " and ".join(stage for stage in stages if stage not in without)
    sides = {"training": run.corpus.train_tasks, "held-out": run.corpus.held_out_tasks}
    for which, tasks in sides.items():
        if not len(tasks) and needing:
            raise ConfigError(
                f"`data.tasks`: the {which} data has no tasks within its limits; expected some, for {needing}: data"
                " with Python functions, or data.tasks.kind=jsonl; without any, 'stages=[pretrain]'"
            )


def _finish(run: Run, models: Models) -> None:
    """Exports the final models, and marks the run as finished."""
    if run.config.run.export:
        _export(run, models)
    run.facts["finished"] = datetime.now().astimezone().isoformat(timespec="seconds")
    run.write_results(finished=True)


def _export(run: Run, models: Models) -> None:
    folder = run.folder / "export"
    copies = _host_copies(models)  # by every process
    if run.main:
        with run.account.on("saving"):
            _write(folder, models, copies, run.corpus.tokenizer, run.config.data.context_length)
    log.info("exported to %s (loads in transformers)", folder)


def _host_copies(models: Models) -> dict[str, dict[str, Any]]:
    """{path: numpy array} of each model by role."""
    return {name: host_copy(module) for name, module in by_role(models).items()}


def _write(
    folder: Path, models: Models, copies: dict[str, dict[str, Any]], tokenizer: Tokenizer, context_length: int
) -> None:
    drafters = {name: arrays for name, arrays in copies.items() if name in ("exit", "eagle")}
    draft = None if models.draft_model is None else (models.draft_model.shape, copies["draft_model"])
    export(folder, models.policy.shape, copies["policy"], drafters, tokenizer, context_length, draft_model=draft)


def _report(run: Run) -> None:
    """Writes the report of whatever the run has reached; its failure must not hide the run's own."""
    if not (run.main and run.recorded):
        return
    failing = sys.exc_info()[0] is not None
    try:
        log.info("report: %s", write_report(run.folder))
    except Exception as error:
        if not failing:
            raise
        log.warning("the report could not be written: %s", error)
        log.debug("the report", exc_info=error)
