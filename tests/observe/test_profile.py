"""Traces: which steps they hold, that they are closed however a run ends, and what they call their slices."""

import gzip
import json

import jax
import jax.numpy as jnp
import pytest

from tlt_jax.observe.profile import Profiler
from tlt_jax.observe.trace_names import PERFETTO, operation_names


@jax.jit
def work(x):
    with jax.named_scope("attention"):
        x = jnp.tanh(x @ x)
    with jax.named_scope("mlp"):
        return jnp.sin(x @ x)


def slices(folder) -> list[dict]:
    (path,) = folder.glob(f"plugins/profile/*/{PERFETTO}")
    return json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]


def run_steps(profiler: Profiler, count: int) -> None:
    made = [jnp.ones((64, 64))]
    for number in range(1, count + 1):
        with profiler.step(number, lambda: made):
            made.append(work(made[-1]))


def test_the_trace_holds_its_steps_and_calls_slices_by_their_scopes(tmp_path):
    with Profiler((2, 4), tmp_path) as profiler:
        run_steps(profiler, 6)
        assert profiler.written
    found = slices(tmp_path)
    steps = [event["args"]["step_num"] for event in found if event.get("name") == "step"]
    assert steps == ["2", "3", "4"]
    scopes = [event["args"]["scope"] for event in found if "scope" in event.get("args", {})]
    assert scopes.count("attention/tanh") == scopes.count("mlp/sin") == 3  # whole steps, and no others
    assert any(event.get("name") == "attention/tanh" and event["args"]["hlo_op"] for event in found)
    (planes,) = tmp_path.glob("plugins/profile/*/*.xplane.pb")
    assert "attention/tanh" in operation_names(planes.read_bytes()).values()
    assert (tmp_path / "device_memory.prof").stat().st_size


def test_a_run_that_ends_inside_closes_its_trace(tmp_path):
    with pytest.raises(InterruptedError), Profiler((2, 9), tmp_path) as profiler:
        run_steps(profiler, 3)
        raise InterruptedError
    assert [event["args"]["step_num"] for event in slices(tmp_path) if event.get("name") == "step"] == ["2", "3"]
    with Profiler((1, 1), tmp_path / "again") as profiler:  # another can be opened
        run_steps(profiler, 1)


def test_a_run_without_these_steps_says_so(tmp_path, caplog):
    with Profiler((7, 9), tmp_path) as profiler:
        run_steps(profiler, 3)
    assert "none of the steps 7 to 9 was run" in caplog.text
    assert not profiler.written and not list(tmp_path.iterdir())
