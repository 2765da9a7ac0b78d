"""Traces of a run's steps, for xprof and Perfetto, and what lies in the devices' memory when they end.

What is written: `plugins/profile/<time>/` with `<host>.xplane.pb` (xprof reads it: `xprof --logdir FOLDER`) and
`perfetto_trace.json.gz` (for ui.perfetto.dev); `device_memory.prof` (pprof reads it).
"""

import contextlib
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax

from tlt_jax.observe.trace_names import write_perfetto

log = logging.getLogger("tlt_jax")

MEMORY_PROFILE = "device_memory.prof"


class Profiler:
    """Traces steps `span` = (first, last) of the run, both included, into `folder`; None: none. A context manager: a
    trace that is open when the run ends, however it does, is closed and written."""

    def __init__(self, span: tuple[int, int] | None, folder: Path):
        self.span, self.folder = span, folder
        self._open, self._seen = False, False

    @property
    def written(self) -> bool:
        """Whether the folder holds a trace, of this part of the run or of one before."""
        return (self.folder / MEMORY_PROFILE).is_file()

    @contextlib.contextmanager
    def step(self, number: int, results: Callable[[], Any]) -> Iterator[None]:
        """Runs step `number` of the run inside. `results` gives the arrays that the steps so far make: they are waited
        for at both ends of the trace, so that it holds whole steps."""
        if self.span is None or not self.span[0] <= number <= self.span[1]:
            yield
            return
        if not self._open:
            jax.block_until_ready(results())
            self._start()
        with jax.profiler.StepTraceAnnotation("step", step_num=number):
            yield
        if number == self.span[1]:
            jax.block_until_ready(results())
            self._stop()

    def __enter__(self) -> "Profiler":
        return self

    def __exit__(self, *exception: object) -> None:
        if self._open:
            self._stop()
        elif self.span and not self._seen and exception[0] is None:
            log.warning("`profile.steps`: none of the steps %d to %d was run here: no trace is written", *self.span)

    def _start(self) -> None:
        options = jax.profiler.ProfileOptions()
        options.python_tracer_level = 0  # Python's own calls would fill the trace before the device's work does
        jax.profiler.start_trace(str(self.folder), profiler_options=options)
        self._open = self._seen = True
        log.info("profile: tracing from here on")

    def _stop(self) -> None:
        self._open = False
        jax.profiler.stop_trace()
        jax.profiler.save_device_memory_profile(str(self.folder / MEMORY_PROFILE))
        newest = max((self.folder / "plugins/profile").iterdir(), key=lambda path: path.stat().st_mtime)
        log.info("profile: open %s in ui.perfetto.dev, or xprof --logdir %s", write_perfetto(newest), self.folder)
