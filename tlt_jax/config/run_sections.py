"""The sections on the run itself: its directory, its budget, what it keeps and traces, what it does about faults."""

import re
from typing import Literal

from pydantic import Field, field_validator

from tlt_jax.config.base import (
    LARGEST_INT,
    AxisSize,
    NonNegativeFloat,
    PathText,
    PositiveFloat,
    PositiveInt,
    Section,
    TrackerName,
)


class RunConfig(Section):
    """The run: its name, its directory, its seed, and what it leaves."""

    name: str = Field("run", description="name of the run directory below output_dir: letters, digits, ._+-")
    output_dir: PathText = Field("runs", description="folder that holds run directories")
    seed: int = Field(0, ge=0, le=LARGEST_INT, description="seeds initialisation, data order and sampling")
    resume: Literal["auto", "never"] = Field(
        "auto", description="auto: continue what the run directory holds; never: start anew, refuse to overwrite"
    )
    log_every: PositiveInt = Field(5, description="steps between two looks at the device; every step is still written")
    samples: int = Field(4, ge=0, le=LARGEST_INT, description="completions shown and kept at each look at the samples")
    trackers: list[TrackerName] = Field(
        ["tensorboard"], description="trackers beside metrics.jsonl; wandb and mlflow need the extra `track`"
    )
    export: bool = Field(True, description="write the final model as a Hugging Face directory")

    @field_validator("name")
    @classmethod
    def _name(cls, name: str) -> str:
        if not re.fullmatch(r"\w[\w.+-]*", name):
            raise ValueError(f"is {name!r}; expected letters, digits and ._+-, the first a letter or digit")
        return name


class WandbConfig(Section):
    """Weights & Biases, where `run.trackers` names it."""

    project: str = Field("tlt_jax", min_length=1, description="project that the run is of")
    entity: str | None = Field(None, description="user or team that the project is of; null: W&B's default")
    mode: Literal["online", "offline"] | None = Field(
        None, description="offline: into <run>/wandb, for `wandb sync`; null: as WANDB_MODE says, else online"
    )


class MlflowConfig(Section):
    """MLflow, where `run.trackers` names it."""

    tracking_uri: str | None = Field(
        None,
        min_length=1,
        description="its server or database; null: as MLFLOW_TRACKING_URI says, else <run.output_dir>/mlflow.db",
    )
    experiment: str = Field("tlt_jax", min_length=1, description="experiment that the run is of")

    @field_validator("tracking_uri")
    @classmethod
    def _without_password(cls, uri: str | None) -> str | None:
        if uri and re.search(r"://[^/@]*:[^/@]*@", uri):  # the config is written down, in the run and in its trackers
            raise ValueError(
                "holds a password; expected an address without one: MLFLOW_TRACKING_USERNAME and"
                " MLFLOW_TRACKING_PASSWORD, or MLFLOW_TRACKING_URI, in the environment are for that"
            )
        return uri


class TrackingConfig(Section):
    """Options of the trackers that need some."""

    wandb: WandbConfig = WandbConfig()
    mlflow: MlflowConfig = MlflowConfig()


class BudgetConfig(Section):
    """One total, divided over the stages that run by their shares."""

    unit: Literal["steps", "tokens", "seconds"] = Field(
        "steps", description="what the total counts; only steps and tokens replay exactly"
    )
    total: float = Field(1000.0, gt=0.0, le=1e15, description="the whole budget, in `unit`")
    pretrain: float = Field(0.4, ge=0.0, le=1e6, description="share of the pretrain stage")
    finetune: float = Field(0.3, ge=0.0, le=1e6, description="share of the finetune stage")
    align: float = Field(0.3, ge=0.0, le=1e6, description="share of the align stage")
    distill: float = Field(0.2, ge=0.0, le=1e6, description="share of the distill stage")


class EvaluationConfig(Section):
    """What evaluations look at."""

    prompts: PositiveInt = Field(256, description="held-out prompts completed at each evaluation of completions")
    batch_size: AxisSize = Field(64, description="rows of an evaluation's batch")


class CheckpointConfig(Section):
    """When checkpoints are saved, and how many are kept."""

    every_steps: PositiveInt | None = Field(None, description="save each so many steps")
    every_seconds: PositiveFloat | None = Field(120.0, description="save each so many seconds")
    keep: PositiveInt = Field(2, description="newest checkpoints kept")


class FaultsConfig(Section):
    """What is done about updates that are not finite, or whose gradient is a spike: they are skipped and counted; and
    about a loop that is stuck: it is told."""

    spike_factor: NonNegativeFloat = Field(
        50.0, description="a gradient norm above so many times its running mean is a spike; 0: none is"
    )
    rollback_after: PositiveInt = Field(
        8, description="steps skipped in a row before the phase goes back to its newest checkpoint and skips their data"
    )
    stop_after: int = Field(
        3,
        ge=0,
        le=LARGEST_INT,
        description="such returns of a phase before the run stops instead; after a hundred updates in a row they no"
        " longer count",
    )
    stuck_after: NonNegativeFloat = Field(
        600.0,
        description="seconds in which nothing ends before a warning names the phase and what is going on, and log.txt"
        " gets the stacks of all threads; ten times as many while JAX compiles; 0: never",
    )

    @field_validator("stuck_after")
    @classmethod
    def _stuck_after(cls, seconds: float) -> float:
        if 0 < seconds < 0.1:
            raise ValueError(f"is {seconds}; expected 0.1 or more seconds, or 0 for never")
        return seconds


class ProfileConfig(Section):
    """What is traced, into the folder `profile` of the run directory."""

    steps: str | None = Field(
        None,
        description="FIRST:LAST, steps of the whole run as metrics.jsonl counts them, both traced; null: none",
    )

    @field_validator("steps", mode="before")
    @classmethod
    def _steps(cls, steps: object) -> object:
        if steps is None:
            return None
        if not isinstance(steps, str) or not re.fullmatch(r"\d{1,9}:\d{1,9}", steps):
            raise ValueError(f"is {steps!r}; expected FIRST:LAST, two steps of the run, as 10:15")
        if not 1 <= int(steps.split(":")[0]) <= int(steps.split(":")[1]):
            raise ValueError(f"is {steps!r}; expected a FIRST of 1 or more, and a LAST not before it")
        return steps

    @property
    def span(self) -> tuple[int, int] | None:
        """(FIRST, LAST), or None where nothing is traced."""
        if self.steps is None:
            return None
        first, last = self.steps.split(":")
        return int(first), int(last)
