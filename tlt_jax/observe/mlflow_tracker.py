"""MLflow: scalars of each step, on a server or in a database file beside the run directories."""

import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tlt_jax.observe.tracking import Opening, numbers

PARAMS_A_CALL = 100  # MLflow takes no more


class MlflowTracker:
    """A run of MLflow with the resolved config, by dotted keys, as its parameters. Later starts go on with the same
    run.

    Steps that it has are not logged again, since MLflow would keep both values; nor are parameters, which MLflow does
    not change. The metric `step` says how far it has come: rows that an earlier start wrote and did not hand over,
    because it was killed, are handed over by the next.
    """

    def __init__(self, opening: Opening):
        """Raises MLflow's errors where its store cannot be reached."""
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        from mlflow import MlflowClient  # only a run that asks for it has it
        from mlflow.entities import Metric, Param, RunStatus

        self._metric, self._status = Metric, RunStatus
        options, runs = opening.config.tracking.mlflow, opening.folder.resolve().parent
        uri = options.tracking_uri or os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{runs}/mlflow.db"
        self._client = MlflowClient(tracking_uri=uri)
        place = f"{uri} {options.experiment}"
        kept = opening.kept("mlflow", place)
        if kept:
            self._id = kept
            self._client.update_run(self._id, status=RunStatus.to_string(RunStatus.RUNNING))
        else:
            experiment = _experiment(self._client, options.experiment, runs if uri.startswith("sqlite:") else None)
            self._id = self._client.create_run(experiment, run_name=opening.config.run.name).info.run_id
            opening.keep("mlflow", place, self._id)
        known = self._client.get_run(self._id).data
        self._logged = int(known.metrics.get("step", opening.logged if known.metrics else 0))
        self._waiting = [row for row in opening.rows if self._logged < row["step"] < opening.first] if kept else []
        new = [Param(key, value) for key, value in _dotted(opening.hyperparameters) if key not in known.params]
        for start in range(0, len(new), PARAMS_A_CALL):
            self._client.log_batch(self._id, params=new[start : start + PARAMS_A_CALL])

    def log(self, step: int, values: Mapping[str, Any]) -> None:
        """Record the metrics among `values` that are finite."""
        while self._waiting:
            self._log(self._waiting[0]["step"], self._waiting[0])
            del self._waiting[0]
        self._log(step, values)

    def _log(self, step: int, values: Mapping[str, Any]) -> None:
        if step > self._logged:
            now = int(1000 * time.time())
            named = numbers(values) | {"step": float(step)}
            metrics = [self._metric(name, value, now, step) for name, value in named.items()]
            self._client.log_batch(self._id, metrics=metrics)
            self._logged = step

    def close(self, failed: bool = False) -> None:
        """Mark the run as finished or failed."""
        status = self._status.FAILED if failed else self._status.FINISHED
        self._client.set_terminated(self._id, self._status.to_string(status))


def _experiment(client: Any, name: str, folder: Path | None) -> str:
    """The id of the experiment, which is made where there is none; `folder`: where a local one keeps artifacts."""
    from mlflow.exceptions import MlflowException

    found = client.get_experiment_by_name(name)
    if found is None:
        location = None if folder is None else (folder / "mlartifacts").as_uri()
        try:
            return client.create_experiment(name, artifact_location=location)
        except MlflowException:  # another run, started at the same time, was faster
            found = client.get_experiment_by_name(name)
            if found is None:
                raise
    return found.experiment_id


def _dotted(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    for name, value in tree.items():
        if isinstance(value, Mapping):
            yield from _dotted(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", str(value)
