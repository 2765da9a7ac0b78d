"""Jitted functions that keep what the compiler says of each executable made of them: FLOPs and bytes."""

import contextlib
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import Mesh

# What a figure is called, and the field of the compiler's memory analysis; in bytes on one device.
MEMORY = {
    "arguments": "argument_size_in_bytes",
    "temporaries": "temp_size_in_bytes",
    "output": "output_size_in_bytes",
    "aliased": "alias_size_in_bytes",
}


class Program:
    """`function`, jitted, called inside `mesh` (None: inside whatever mesh is set).

    `figures` has an entry for each shape that argument number `varies` (None: all calls are alike) has had: "name";
    "shape", of that argument's largest array, None where nothing varies; "flops" of one call on one device, where
    XLA counts a loop's body once; and the keys of `MEMORY`. What the compiler does not say is None. To ask it costs
    tens of milliseconds and compiles nothing twice: the call that follows finds the executable in JAX's cache.
    """

    def __init__(self, name: str, function: Any, mesh: Mesh | None = None, varies: int | None = None):
        self.name, self.figures = name, list[dict[str, Any]]()
        self._function, self._mesh, self._varies = function, mesh, varies
        self._known: set[Any] = set()

    def __call__(self, *args: Any) -> Any:
        with self._in_mesh():
            varying = jax.tree.leaves(args[self._varies]) if self._varies is not None else []
            shapes = tuple(leaf.shape for leaf in varying)
            if shapes not in self._known:
                self._known.add(shapes)
                shape = " x ".join(map(str, max(varying, key=lambda leaf: leaf.size).shape)) if varying else None
                self.figures.append({"name": self.name, "shape": shape, **figures_of(self._function, args)})
            return self._function(*args)

    def lower(self, *args: Any) -> jax.stages.Lowered:
        """For arguments of these shapes and shardings, which may be abstract; ready to be compiled."""
        with self._in_mesh():
            return self._function.lower(*args)

    def _in_mesh(self) -> contextlib.AbstractContextManager:
        return jax.set_mesh(self._mesh) if self._mesh is not None else contextlib.nullcontext()


def figures_of(function: Callable[..., Any], args: tuple[Any, ...]) -> dict[str, float | None]:
    """What the compiler says of the jitted `function` for such arguments: "flops", and the keys of `MEMORY`."""
    compiled = function.lower(*args).compile()  # type: ignore[attr-defined]
    memory, cost = compiled.memory_analysis(), compiled.cost_analysis()
    flops = (cost or {}).get("flops", -1.0)  # below 0: not known
    return {
        "flops": float(flops) if flops >= 0 else None,
        **{name: float(getattr(memory, field)) if memory else None for name, field in MEMORY.items()},
    }


def planned_bytes(figures: dict[str, Any]) -> float:
    """What a call takes on one device: arguments, temporaries, and the output as far as it is not an argument's."""
    return sum(figures[name] or 0.0 for name in ("arguments", "temporaries", "output")) - (figures["aliased"] or 0.0)
