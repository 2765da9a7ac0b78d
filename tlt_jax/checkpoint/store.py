"""Numbered checkpoints of flat {path: array} dictionaries and a JSON document, kept by Orbax.

Saving is asynchronous. When a save is whole on disk, a manifest with the sha256 of each of its files is written beside
it; only a checkpoint that matches its manifest is restored, because Orbax itself returns a damaged file's bytes as
they are. The newest that verifies wins.
"""

import hashlib
import json
import logging
import os
import shutil
import threading
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp

from tlt_jax.config import ConfigError
from tlt_jax.parallel.hosts import Company
from tlt_jax.parallel.peers import Alone

log = logging.getLogger("tlt_jax")
Arrays = dict[str, Any]
KEPT_ASIDE = 3  # damaged checkpoints that are kept to be looked at


class Store:
    """The newest `keep` checkpoints (None: all) in one folder. Leaving it as a context waits for the last save.

    A read-only store may be opened on the folder of a run that is going on: it changes nothing there.
    """

    def __init__(self, folder: Path, keep: int | None = None, read_only: bool = False, company: Company | None = None):
        self.folder = folder.absolute()
        self._company = company or Alone()
        self._main = self._company.process == 0
        self._manifests = self.folder / "manifests"
        self._keep, self._read_only = keep, read_only
        if not read_only and self._main:
            self._manifests.mkdir(parents=True, exist_ok=True)
            # Orbax would do so in a thread of its own, which complains where the program ends soon.
            for unfinished in self._unfinished():
                shutil.rmtree(unfinished)
        options = ocp.CheckpointManagerOptions(read_only=read_only, create=not read_only)
        handlers: dict[str, Any] = {
            "arrays": ocp.StandardCheckpointHandler(),
            "document": ocp.JsonCheckpointHandler(),
        }
        self._manager = ocp.CheckpointManager(self.folder / "steps", options=options, item_handlers=handlers)
        self._sealing: threading.Thread | None = None
        self._failure: BaseException | None = None
        self._broken = False  # Orbax's threads wait, five minutes long, for what a save that failed half-way won't do

    def __enter__(self) -> "Store":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def newest(self) -> int | None:
        """The newest step that verifies, or None where nothing was ever saved whole; process 0 looks, for all.

        One that does not is set aside, with a warning that says why; a read-only store leaves it where it is. Raises
        ConfigError if none verifies of those that were saved whole: to begin anew is then for the user to decide.
        """
        found = self._newest() if self._main else None
        found = self._company.agree("the newest checkpoint", found)[0]
        self._manager.reload()  # what Orbax saw when it was opened may have been set aside
        return found

    def verifies(self, step: int) -> bool:
        """Whether that step is there, as it was saved; process 0 looks, for all."""
        found = self._main and step in self._steps() and self._fault(step) is None
        return self._company.agree("whether a checkpoint verifies", found)[0]

    def _newest(self) -> int | None:
        sealed = {int(path.stem) for path in self._manifests.glob("*.json") if _is_number(path.stem)}
        faults: dict[int, str] = {}
        for step in sorted({*self._steps(), *sealed}, reverse=True):
            fault = self._fault(step)
            if fault is None:
                break
            faults[step] = fault
            log.warning("checkpoint %d does not verify (%s); looking for an older one", step, fault)
        else:
            # One that has no manifest may be a first save that was interrupted; several were whole once.
            if sealed or len(faults) > 1:
                why = next(iter(faults.values()))
                raise ConfigError(
                    f"none of the checkpoints in {str(self.folder)!r} verifies ({why}); expected a new run.name, or"
                    " that folder moved away, to begin anew"
                )
            step = None
        for damaged in faults if not self._read_only else ():
            self._set_aside(damaged)
        return step

    def save(self, step: int, arrays: Arrays, document: dict) -> None:
        """Starts to save; returns once the arrays may be donated. Raises what an earlier save failed with."""
        self.wait()
        if self._main:
            self._check_space(arrays)
        args = ocp.args.Composite(
            arrays=ocp.args.StandardSave(arrays), document=ocp.args.JsonSave(json.loads(json.dumps(document)))
        )
        try:
            self._manager.save(step, args=args, force=True)
        except BaseException:
            self._broken = True
            self._sweep()
            raise
        self._sealing = threading.Thread(target=self._seal, args=(step,), name="checkpoint-seal")
        self._sealing.start()

    def document(self, step: int) -> dict:
        """The JSON document of a step."""
        return self._manager.restore(step, args=ocp.args.Composite(document=ocp.args.JsonRestore()))["document"]

    def restore(self, step: int, like: Arrays) -> Arrays:
        """The arrays of a step, laid out as `like` (abstract or real arrays with shardings) says.

        Raises ConfigError where paths, shapes or types differ from what was saved, and says which.
        """
        target = {path: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=a.sharding) for path, a in like.items()}
        saved = self._manager.item_metadata(step)["arrays"]
        differences = _differences(
            {path: (tuple(m.shape), str(m.dtype)) for path, m in saved.items()},
            {path: (a.shape, str(a.dtype)) for path, a in target.items()},
        )
        if differences:
            raise ConfigError(f"checkpoint {step} in {self.folder} does not fit the config: {'; '.join(differences)}")
        return self._manager.restore(step, args=ocp.args.Composite(arrays=ocp.args.StandardRestore(target)))["arrays"]

    def restore_host(self, step: int) -> Arrays:
        """All arrays of a step, on the host, however many devices they were saved from."""
        sharding = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
        saved = self._manager.item_metadata(step)["arrays"]
        target = {path: jax.ShapeDtypeStruct(m.shape, m.dtype, sharding=sharding) for path, m in saved.items()}
        whole = self._manager.restore(step, args=ocp.args.Composite(arrays=ocp.args.StandardRestore(target)))["arrays"]
        return {path: jax.device_get(array) for path, array in whole.items()}

    def wait(self) -> None:
        """Waits until the last save is whole and sealed."""
        if self._sealing is not None:
            self._sealing.join()
            self._sealing = None
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure

    def close(self) -> None:
        self.wait()
        if not self._broken:
            self._manager.close()

    def _seal(self, step: int) -> None:
        """In its own thread: once the save is whole, writes its manifest, and only then deletes what is too old."""
        try:
            self._manager.wait_until_finished()
            if not self._main:
                return
            partial = self._manifests / f"{step}.json.partial"
            partial.write_text(json.dumps(_digests(self._path(step)), indent=0, sort_keys=True))
            partial.replace(self._manifests / f"{step}.json")
            for old in sorted(self._steps())[: -self._keep] if self._keep else []:
                shutil.rmtree(self._path(old))
                (self._manifests / f"{old}.json").unlink(missing_ok=True)
        except BaseException as error:  # handed to the next save, wait or close
            self._failure = error
            self._sweep()

    def _check_space(self, arrays: Arrays) -> None:
        """Raises ConfigError where the disk has no room for another checkpoint: a save that fails leaves it full."""
        needed = sum(array.nbytes for array in arrays.values()) + 2**20
        free = shutil.disk_usage(self.folder).free
        if free < needed:
            raise ConfigError(
                f"the disk of {str(self.folder)!r} has {free / 2**20:,.1f} MiB free, and a checkpoint takes"
                f" {needed / 2**20:,.1f} MiB; expected more room, or a smaller `checkpoint.keep`"
            )

    def _sweep(self) -> None:
        """Removes what a save that failed has written, as far as its threads are done: on a full disk, the rest of the
        run's end needs the room. What is left goes when the store is opened again."""
        for unfinished in self._unfinished() if self._main else []:
            shutil.rmtree(unfinished, ignore_errors=True)

    def _unfinished(self) -> list[Path]:
        return list(self.folder.glob("steps/*.orbax-checkpoint-tmp*"))

    def _steps(self) -> list[int]:
        return [int(path.name) for path in (self.folder / "steps").glob("*") if _is_number(path.name)]

    def _path(self, step: int) -> Path:
        return self.folder / "steps" / str(step)

    def _fault(self, step: int) -> str | None:
        manifest = self._manifests / f"{step}.json"
        if self._path(step).is_symlink():
            return "it is a link"
        if not manifest.is_file():
            return "it has no manifest: its saving was interrupted"
        try:
            expected = json.loads(manifest.read_text())
        except (ValueError, RecursionError):
            expected = None
        if not isinstance(expected, dict) or not all(
            any(name.startswith(f"{item}/") for name in expected) for item in ("arrays", "document")
        ):
            return "its manifest cannot be read, or is not whole"
        found = _digests(self._path(step))
        wrong = [name for name in sorted(expected.keys() | found.keys()) if expected.get(name) != found.get(name)]
        return f"{wrong[0]} is missing, added or changed" if wrong else None

    def _set_aside(self, step: int) -> None:
        damaged = self.folder / "damaged"
        damaged.mkdir(exist_ok=True)
        (self._manifests / f"{step}.json").unlink(missing_ok=True)
        _remove(damaged / str(step))
        if os.path.lexists(self._path(step)):
            self._path(step).rename(damaged / str(step))
        for old in sorted(damaged.iterdir(), key=lambda path: path.lstat().st_mtime)[:-KEPT_ASIDE]:
            _remove(old)


def _remove(path: Path) -> None:
    """Removes a folder, or a link or file in its place; what is not there is fine."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _is_number(name: str) -> bool:
    return name.isascii() and name.isdigit()


def _digests(folder: Path) -> dict[str, str]:
    """{relative name: sha256} of every file below `folder`."""
    return {
        str(f.relative_to(folder)): hashlib.sha256(f.read_bytes()).hexdigest()
        for f in sorted(folder.rglob("*"))
        if f.is_file()
    }


def _differences(saved: dict[str, Any], wanted: dict[str, Any]) -> list[str]:
    """At most five readable differences."""
    lines = []
    for path in sorted(saved.keys() | wanted.keys()):
        if path not in saved:
            lines.append(f"{path} is not in the checkpoint")
        elif path not in wanted:
            lines.append(f"{path} is in the checkpoint alone")
        elif saved[path] != wanted[path]:
            lines.append(f"{path} is {saved[path]}, expected {wanted[path]}")
    return lines[:5] + ([f"and {len(lines) - 5} more"] if len(lines) > 5 else [])
