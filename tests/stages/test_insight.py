"""Hints fire, once, on what they are for and on nothing else; what counts as waiting."""

import json
import math
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import jax.numpy as jnp
import pytest

from tlt_jax.config import load_config
from tlt_jax.data.loader import Loader
from tlt_jax.stages import insight
from tlt_jax.stages.insight import Insight, largest_buffers
from tlt_jax.stages.pipeline import pretrain
from tlt_jax.stages.supervised import Supervised, when_ready

ROOT = Path(__file__).resolve().parents[2]
UPDATE = {
    "name": "update",
    "shape": "1",
    "flops": 1.0,
    "arguments": 1e6,
    "temporaries": 3e6,
    "output": 1e6,
    "aliased": 1e6,
}


def watched(**record) -> tuple[SimpleNamespace, Insight]:
    """(a run, what watches its phase), of 100 FLOP/s where a token takes one."""
    run = SimpleNamespace(
        results=[{"stage": "pretrain", "phase": "pretrain", **record}],
        main=True,
        document=None,
        step=0,
        compile_seconds=0.0,
        peak_flops=100.0,
        facts={},
        profiler=SimpleNamespace(step=lambda number, arrays: nullcontext(), written=False),
    )
    engine = SimpleNamespace(blocks={"off": SimpleNamespace(figures=[])})
    phase = SimpleNamespace(
        stage="pretrain",
        name="pretrain",
        flops_per_token=1.0,
        waited=0.0,
        update=SimpleNamespace(figures=[UPDATE]),
        sampler=SimpleNamespace(engine=engine),
    )
    return run, Insight(run, phase, {"train": {"w": jnp.ones((4, 4))}})


def take(
    run, found: Insight, steps: int, loss: Callable[[int], float], wait=lambda step: 0.0, compiles=lambda step: 0.0
):
    """Takes steps of a second each, that wait for data and compile so long."""
    for _ in range(steps):
        with found.step(lambda: None):
            run.compile_seconds += compiles(run.step + 1)
        run.step += 1
        found.phase.waited = wait(run.step)
        found.look([{"train/loss": loss(run.step), **found.rates(50.0, 1.0)}])


def falling(step: int) -> float:
    return 2.0 + 5.0 * step**-0.3


def names(run) -> list[str]:
    return [hint["name"] for hint in run.results[-1]["health"]]


def test_a_healthy_phase_gets_no_hints():
    """Though its first steps compile, and wait for what is not read ahead yet."""
    run, found = watched()
    take(run, found, 300, falling, lambda step: 0.9 if step < 8 else 0.05, lambda step: 2.0 if step < 6 else 0.0)
    assert names(run) == []


@pytest.mark.parametrize(
    ("name", "loss", "options"),
    [
        ("input-bound", falling, {"wait": lambda step: 0.5}),
        ("recompiling", falling, {"compiles": lambda step: 1.5 if step > 40 else 0.0}),
        ("loss not falling", lambda step: 7.6 + 0.01 * math.sin(step), {}),
    ],
)
def test_a_hint_fires_once(name, loss, options, caplog):
    run, found = watched()
    take(run, found, 100, loss, **options)
    assert names(run) == [name]
    assert caplog.text.count(f"pretrain pretrain: {name}: ") == 1


def test_a_device_without_memory_is_named_with_its_largest_buffers(monkeypatch):
    run, found = watched()
    monkeypatch.setattr(insight, "peak_memory", lambda: 1e6)
    monkeypatch.setattr(insight, "memory_limit", lambda: 4.5e6)  # the update alone plans with 4 MB
    take(run, found, 1, falling)
    assert names(run) == []
    monkeypatch.setattr(insight, "memory_limit", lambda: 4.2e6)
    take(run, found, 3, falling)
    assert names(run) == ["memory-bound"]
    assert "temporaries of update 2.9 MiB, train/w 0.0 MiB" in run.results[-1]["health"][0]["text"]


def test_a_phase_that_goes_on_does_not_repeat_its_hints():
    run, found = watched(health=[{"name": "input-bound", "text": "as it was"}])
    take(run, found, 100, falling, lambda step: 0.5)
    assert run.results[-1]["health"] == [{"name": "input-bound", "text": "as it was"}]


def test_rates_by_hand():
    _, found = watched()
    found.phase.waited = 0.5
    assert found.rates(50.0, 2.0) == {"train/mfu": 0.5, "train/data_wait_fraction": 0.25}
    assert found.rates(50.0, 2.0)["train/data_wait_fraction"] == 0.0  # counted once


def test_figures_of_a_part_before_an_interruption_stay():
    before = UPDATE | {"shape": "2"}
    _, found = watched(programs=[before, UPDATE | {"flops": 9.0}])
    assert found.figures() == {"programs": [before, UPDATE], "buffers": [{"name": "train/w", "bytes": 64.0}]}


def test_the_largest_buffers_come_first():
    arrays = {"a": {"small": jnp.ones(2), "large": jnp.ones((4, 4))}}
    assert largest_buffers(arrays) == [("a/large", 64.0), ("a/small", 8.0)]


@pytest.mark.parametrize(
    ("done", "waited"),
    [(None, 2.0), (5.0, 2.0), (11.5, 0.5), (12.0, 0.0), (math.inf, 0.0)],
    ids=["no update yet", "before", "meanwhile", "as it came", "not yet"],
)
def test_waiting_counts_from_when_the_devices_have_run_out_of_work(monkeypatch, done, waited):
    """The batch is asked for at 10 and comes at 12."""
    ticks = iter([10.0, 12.0])
    monkeypatch.setattr(time, "monotonic", lambda: next(ticks))
    future = None if done is None else Future()
    if done is not None and done < math.inf:
        future.set_result(done)
    phase = SimpleNamespace(waited=0.0, loader=iter([1]), _done=future)
    assert Supervised._next(phase) == 1
    assert phase.waited == waited


def test_a_watched_array_is_waited_for():
    before = time.monotonic()
    assert before <= when_ready(jnp.ones(3) + 1).result(timeout=10) <= time.monotonic()


def test_a_watched_array_that_fails_gives_no_figure():
    gone = jnp.ones(3)
    gone.delete()
    future = when_ready(gone)
    assert isinstance(future.exception(timeout=10), RuntimeError)
    phase = SimpleNamespace(waited=0.0, loader=iter([1]), _done=future)
    assert Supervised._next(phase) == 1 and phase.waited == 0.0


@pytest.mark.slow
def test_each_hint_fires_in_a_real_run(tmp_path, monkeypatch):
    """A loader that is slow, and from some step on gives shorter and shorter rows; a learning rate of nothing; a
    device without memory."""
    whole, taken = Loader.__next__, []

    def slow(self):
        batch = whole(self)
        taken.append(self)
        time.sleep(0.05)
        missing = max(0, min(len(taken) - 80, 3))
        return {name: array[..., : 128 - 4 * missing] for name, array in batch.items()}

    monkeypatch.setattr(Loader, "__next__", slow)
    monkeypatch.setattr(insight, "memory_limit", lambda: 1e6)
    options = [f"run.output_dir={tmp_path}", f"data.cache_dir={tmp_path}/data", "device.compilation_cache="]
    options += ["stages=[pretrain]", "budget.total=90", "pretrain.eval_every=1000", "run.export=false"]
    pretrain(load_config(ROOT / "configs/tiny.yaml", [*options, "pretrain.optimizer.learning_rate=1e-9"]))
    (phase,) = json.loads((tmp_path / "tiny/results.json").read_text())["phases"]
    given = {hint["name"]: hint["text"] for hint in phase["health"]}
    assert set(given) == {"input-bound", "memory-bound", "loss not falling", "recompiling"}
    assert "steps 81, 82, 83 compiled anew" in given["recompiling"]
    assert "temporaries of update" in given["memory-bound"]
    assert len([entry for entry in phase["programs"] if entry["name"] == "update"]) == 4
    log, page = (tmp_path / "tiny/log.txt").read_text(), (tmp_path / "tiny/report.html").read_text()
    for name in given:
        assert log.count(f"pretrain pretrain: {name}: ") == 1
        assert f"<strong>{name}</strong>" in page
