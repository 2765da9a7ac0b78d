"""Weights & Biases: scalars of each step, online or into `<run>/wandb` for `wandb sync`."""

import os
import secrets
from collections.abc import Mapping
from typing import Any

from tlt_jax.observe.tracking import Opening, numbers

FLUSHING = "x_transaction_log_flush_interval"  # a setting that versions may lack: seconds between writes of its file


class WandbTracker:
    """A run of W&B with the resolved config as its config. Later starts of the run go on under the same id; offline
    each leaves a folder of its own, of that id.

    Steps that an earlier start has logged are not logged again, since W&B's steps only grow: online those that its
    server has, offline those that metrics.jsonl had. A process that is killed without warning leaves offline files
    that may lack the rows of its last second.
    """

    def __init__(self, opening: Opening):
        """Raises wandb's errors where it cannot be reached or knows no account."""
        options = opening.config.tracking.wandb
        place = f"{options.entity}/{options.project}"
        mode = options.mode or ("offline" if os.environ.get("WANDB_MODE") == "offline" else "online")
        if mode == "offline":
            os.environ.setdefault("WANDB_ERROR_REPORTING", "false")  # its reports of its own errors go out even so
        import wandb  # only a run that asks for it has it

        kept = opening.kept("wandb", place)
        identity = kept or secrets.token_hex(4)
        # The terminal is the run's; and W&B's own description of it holds the command line, with secrets in it.
        settings: dict[str, Any] = {"console": "off", "quiet": True, "x_disable_meta": True}
        if FLUSHING in wandb.Settings.model_fields:
            settings[FLUSHING] = 1.0
        self._run = wandb.init(
            project=options.project,
            entity=options.entity,
            name=opening.config.run.name,
            mode=mode,
            id=identity,
            resume="allow",
            dir=str(opening.folder),
            config=dict(opening.hyperparameters),
            allow_val_change=True,
            settings=wandb.Settings(**settings),
        )
        self._first = self._run.step or (opening.logged + 1 if kept else 0)
        opening.keep("wandb", place, identity)

    def log(self, step: int, values: Mapping[str, Any]) -> None:
        """Record the metrics among `values` that are finite."""
        if step >= self._first:
            self._run.log(numbers(values), step=step)

    def close(self, failed: bool = False) -> None:
        """Write out what is pending, and mark the run as finished or failed."""
        self._run.finish(exit_code=int(failed))
