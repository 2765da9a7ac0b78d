"""Jitted functions that know what was compiled of them."""

import jax
import jax.numpy as jnp
import pytest

from tlt_jax.parallel.programs import Program, planned_bytes


@pytest.fixture
def compiled():
    """How many times the backend has compiled something."""
    events = []
    active = True

    def listen(event: str, duration: float, **_) -> None:
        if active and event.endswith("backend_compile_duration"):
            events.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield events
    active = False


def step(state, batch):
    return state + jnp.sum(batch["rows"] @ state), 1.0


def test_figures_by_shape_and_nothing_is_compiled_twice(compiled):
    function = jax.jit(step, donate_argnums=0)
    program = Program("update", function, varies=1)
    state, first, second = jnp.ones((64, 64)), jnp.ones((32, 64)), jnp.ones((8, 64))
    jax.block_until_ready([state, first, second])
    compiled.clear()
    for rows in (first, second, first, first):
        state, _ = program(state, {"rows": rows})
    assert len(compiled) == 2
    assert [(entry["name"], entry["shape"]) for entry in program.figures] == [
        ("update", "32 x 64"),
        ("update", "8 x 64"),
    ]
    large, small = program.figures
    assert large["flops"] == pytest.approx(2 * 32 * 64 * 64, rel=0.1)
    assert large["arguments"] == 4 * (64 * 64 + 32 * 64) and large["aliased"] == 4 * 64 * 64
    assert small["arguments"] == 4 * (64 * 64 + 8 * 64)
    assert planned_bytes(large) == large["arguments"] + large["temporaries"] + large["output"] - large["aliased"]


def test_what_does_not_vary_is_asked_once():
    program = Program("block", jax.jit(lambda x: x + 1))
    for _ in range(3):
        program(jnp.ones(4))
    assert [(entry["name"], entry["shape"]) for entry in program.figures] == [("block", None)]
