"""What a phase learns of itself while it runs: traces, rates, what was compiled, and hints on its health."""

import logging
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from tlt_jax.models.declare import flatten
from tlt_jax.observe import health, read_rows
from tlt_jax.observe.utilisation import peak_flops
from tlt_jax.parallel.programs import planned_bytes
from tlt_jax.stages.memory import memory_limit, peak_memory
from tlt_jax.stages.run import Run

log = logging.getLogger("tlt_jax")

LARGEST = 5  # buffers that are named


class Insight:
    """Of one phase (`stages.loop.Phase`), whose record in the run's results it fills: "health", "programs", "buffers".

    Hints are given once a phase, by process 0.
    """

    def __init__(self, run: Run, phase: Any, arrays: dict[str, Any]):
        self.run, self.phase = run, phase
        self.waits: list[float] = []
        self.losses = self._losses_before() if phase.flops_per_token else []
        self.looked_at = 0  # losses, when last judged
        self.compiled: list[tuple[int, float]] = []
        self.steps = 0
        self.record = run.results[-1]
        self.hints: list[dict[str, str]] = self.record.setdefault("health", [])
        self.buffers = largest_buffers(arrays)
        self.peak = 0.0
        if phase.flops_per_token:
            if run.peak_flops is None:
                run.peak_flops, run.facts["peak"] = peak_flops(run.dtype)
            self.peak = run.peak_flops

    @contextmanager
    def step(self, arrays: Callable[[], Any]) -> Iterator[None]:
        """The phase's step runs inside; `arrays` gives those of its state."""
        before = self.run.compile_seconds
        with self.run.profiler.step(self.run.step + 1, arrays):
            yield
        self.steps += 1
        seconds = self.run.compile_seconds - before
        if seconds and self.steps > health.SETTLED:
            self.compiled.append((self.run.step + 1, seconds))

    def rates(self, speed: float, seconds: float) -> dict[str, float]:
        """Metrics of a supervised phase's last `seconds`, in which it took `speed` tokens a second."""
        found = {}
        if self.phase.flops_per_token:
            found["train/mfu"] = speed * self.phase.flops_per_token / self.peak
            found["train/data_wait_fraction"] = min(self.phase.waited / seconds, 1.0)
            self.phase.waited = 0.0
        return found

    def look(self, rows: list[dict[str, Any]]) -> None:
        """Judges the phase by its newest rows and all that came before."""
        for row in rows:
            if "train/data_wait_fraction" in row and self.steps > health.SETTLED:
                self.waits = [*self.waits[-health.INPUT_STEPS :], row["train/data_wait_fraction"]]
            if self.phase.flops_per_token:
                self.losses.append(row["train/loss"])
        self._hint(health.INPUT, health.input_bound(self.waits))
        self._hint(health.COMPILING, health.recompiling(self.compiled))
        # Each look sorts all of them: they come at distances that grow with the phase.
        if len(self.losses) >= max(health.LOSS_STEPS, 1.25 * self.looked_at):
            self.looked_at = len(self.losses)
            self._hint(health.LOSS, health.loss_not_falling(self.losses))
        self._look_at_memory()

    def figures(self) -> dict[str, Any]:
        """What the phase's record says of its programs and buffers, those of a part before an interruption included."""
        if self.run.profiler.written:
            self.run.facts["profile"] = "profile/plugins/profile/ for xprof and Perfetto, profile/device_memory.prof"
        entries = [*self.record.get("programs", []), *self._programs()]
        programs = {(entry["name"], entry["shape"]): entry for entry in entries}
        buffers = [{"name": name, "bytes": size} for name, size in self.buffers]
        return {"programs": list(programs.values()), "buffers": buffers}

    def _programs(self) -> list[dict[str, Any]]:
        """Figures of what this phase has compiled. The decode block, which phases share, counts for the first."""
        earlier = [entry["name"] for record in self.run.results[:-1] for entry in record.get("programs", [])]
        decode = [
            entry
            for block in self.phase.sampler.engine.blocks.values()
            for entry in block.figures
            if entry["name"] not in earlier
        ]
        return [*self.phase.update.figures, *decode]

    def _look_at_memory(self) -> None:
        programs = self._programs()
        largest = sorted(
            [*self.buffers, *((f"temporaries of {p['name']}", p["temporaries"] or 0.0) for p in programs)],
            key=lambda pair: -pair[1],
        )
        needed = max([peak_memory(), *map(planned_bytes, programs)])
        self._hint(health.MEMORY, health.memory_bound(needed, memory_limit(), largest[:LARGEST]))

    def _hint(self, name: str, text: str | None) -> None:
        if text is None or not self.run.main or name in [hint["name"] for hint in self.hints]:
            return
        self.hints.append({"name": name, "text": text})
        log.warning("%s %s: %s: %s", self.phase.stage, self.phase.name, name, text)

    def _losses_before(self) -> list[float]:
        """The losses of the phase's steps before an interruption, from their rows."""
        rows = read_rows(self.run.metrics.path) if self.run.main and self.run.document else []
        own = [row for row in rows if (row.get("stage"), row.get("phase")) == (self.phase.stage, self.phase.name)]
        return [math.nan if row.get("train/loss") is None else row["train/loss"] for row in own]


def largest_buffers(arrays: dict[str, Any]) -> list[tuple[str, float]]:
    """The largest arrays of a phase's state, by name, with their bytes on one device."""
    sizes = {name: float(array.addressable_shards[0].data.nbytes) for name, array in flatten(arrays).items()}
    return sorted(sizes.items(), key=lambda pair: -pair[1])[:LARGEST]
