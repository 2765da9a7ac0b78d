"""How much memory a training step takes, feature by feature: a ladder down from a naive step.

    python benchmarks/memory.py [--size 60m] [--rows 8] [--context 512] [--quick] [--json FILE]

The bytes are the compiler's own (`memory_analysis()` of the compiled step): arguments, results that are not in the
place of an argument, and temporaries. The naive step is plain JAX: `jax.value_and_grad` of the cross-entropy of all
logits, `jax.nn.dot_product_attention`, `optax.adamw`, nothing donated. Every step in float32 is run once and must give
the naive one's loss to 1e-5.
"""

import argparse
import platform
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple
from unittest.mock import patch

import jax

DEVICES = 8
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", DEVICES)

import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
import optax  # noqa: E402
from jax.sharding import Mesh  # noqa: E402
from results import report  # noqa: E402
from shapes import SIZES  # noqa: E402

from tlt_jax.config.device_sections import MeshConfig  # noqa: E402
from tlt_jax.config.stage_sections import OptimizerConfig  # noqa: E402
from tlt_jax.models import transformer  # noqa: E402
from tlt_jax.models.declare import initialise  # noqa: E402
from tlt_jax.models.transformer import ModelShape, Transformer, hidden_states, logits  # noqa: E402
from tlt_jax.parallel.mesh import make_mesh  # noqa: E402
from tlt_jax.parallel.sharding import put_batch  # noqa: E402
from tlt_jax.train.losses import cross_entropy, next_token_objective  # noqa: E402
from tlt_jax.train.precision import FLOAT32, Precision  # noqa: E402
from tlt_jax.train.state import Role, abstract_state, new_state  # noqa: E402
from tlt_jax.train.step import make_update  # noqa: E402

ADAM = OptimizerConfig(learning_rate=1e-3)
CLOSE = 1e-5


class Rung(NamedTuple):
    """A step of ours: what it switches on, and on how many devices (split over fsdp) it runs."""

    remat: str = "none"
    chunk: int = 0
    accumulation: int = 1
    precision: Precision = FLOAT32
    devices: int = 1


class Found(NamedTuple):
    """Bytes on a device, and the loss; None where the step was not run."""

    size: int
    loss: float | None


def main() -> None:
    options = _options()
    shape, rows, context = SIZES[options.size], options.rows, options.context
    batch = _batch(shape, rows, context)
    found: dict[str, Found] = {
        "naive: all logits, nothing donated": _plain(shape, batch, donated=False),
        "donated buffers": _plain(shape, batch, donated=True),
    }
    half = Precision(jnp.dtype("bfloat16"), half_weights=True)
    rung = Rung(chunk=context)
    ladder: dict[str, Callable[[Rung], Rung]] = {
        "our step: attention by blocks, head's gradient with the loss": lambda r: r,
        "loss in chunks of 64 positions": lambda r: r._replace(chunk=64),
        "remat: all but matrix products": lambda r: r._replace(remat="dots"),
        "remat: whole layers": lambda r: r._replace(remat="full"),
        "4 microbatches": lambda r: r._replace(accumulation=4),
        "bfloat16, matrices and gradients too (O2)": lambda r: r._replace(precision=half),
        f"fsdp over {DEVICES} devices, float32, each": lambda r: r._replace(
            precision=FLOAT32, devices=DEVICES, accumulation=1
        ),
    }
    for name, change in ladder.items():
        rung = change(rung)
        found[name] = _ours(shape, batch, rung)
    _print(found)
    naive = next(iter(found.values()))
    apart = [
        n for n, f in found.items() if f.loss is not None and "bfloat16" not in n and abs(f.loss - naive.loss) > CLOSE
    ]
    what = {"model": options.size, "rows": rows, "context": context, "losses_apart": apart}
    values = {name: f._asdict() for name, f in found.items()} | what
    ratios = {name: f.size / naive.size for name, f in found.items()}
    machine = f"{platform.machine()}, compiled for {DEVICES} simulated CPU devices"
    report("memory", machine, ("jax", "jaxlib", "flax", "optax"), values, ratios, options.json)
    raise SystemExit(1 if apart else 0)


def _plain(shape: ModelShape, batch: dict[str, np.ndarray], donated: bool) -> Found:
    optimizer = optax.adamw(1e-3)

    def loss(model: Transformer, b: dict[str, jax.Array]) -> jax.Array:
        x_BSD = hidden_states(model, b["tokens"], b["segments"], b["positions"], dtype=jnp.float32)[1]
        return jnp.mean(cross_entropy(logits(model, x_BSD), b["targets"]))

    def step(model: Transformer, state: Any, b: dict[str, jax.Array]) -> tuple[Transformer, Any, jax.Array]:
        value, gradients = jax.value_and_grad(loss)(model, b)
        updates, state = optimizer.update(gradients, state, model)
        return optax.apply_updates(model, updates), state, value

    model = initialise(lambda declare: Transformer(shape, declare), _mesh(1), jax.random.key(0))
    state = jax.jit(optimizer.init)(model)
    one = {name: array[0] for name, array in batch.items()}
    with _plain_layers():
        compiled = jax.jit(step, donate_argnums=(0, 1) if donated else ()).lower(model, state, one).compile()
    return Found(_size(compiled), float(compiled(model, state, one)[2]))


@contextmanager
def _plain_layers() -> Iterator[None]:
    """The model's layers as plain JAX writes them, with the backward passes that it makes."""

    def attention(q: jax.Array, k: jax.Array, v: jax.Array, segments_BS: jax.Array) -> jax.Array:
        same = segments_BS[:, None, :, None] == segments_BS[:, None, None, :]
        return jax.nn.dot_product_attention(q, k, v, mask=same, is_causal=True)

    def linear(x: jax.Array, weight: jax.Array, axes: int = 1) -> jax.Array:
        return jnp.tensordot(x, weight, axes)

    def swiglu(gate: jax.Array, up: jax.Array) -> jax.Array:
        return jax.nn.silu(gate) * up

    with patch.multiple(transformer, causal_attention=attention, linear=linear, swiglu=swiglu):
        yield


def _ours(shape: ModelShape, batch: dict[str, np.ndarray], rung: Rung) -> Found:
    mesh = _mesh(rung.devices)
    roles = {"policy": Role(lambda declare: Transformer(shape, declare), ADAM)}
    objective = next_token_objective(
        dtype=rung.precision.dtype, remat=rung.remat, exit_weight=0.0, exit_stride=1, loss_chunk=rung.chunk
    )
    update = make_update(objective, roles, mesh, precision=rung.precision)
    parts = {name: array[0].reshape(rung.accumulation, -1, array.shape[-1]) for name, array in batch.items()}
    placed = put_batch(mesh, parts, leading=1)
    compiled = update.lower(abstract_state(roles, mesh, rung.precision), placed, np.float32(0.5)).compile()
    params = {"policy": initialise(roles["policy"].build, mesh, jax.random.key(0))}
    _, metrics = compiled(new_state(roles, params, mesh, rung.precision), placed, np.float32(0.5))
    return Found(_size(compiled), float(metrics["train/loss"]))


def _size(compiled: Any) -> int:
    m = compiled.memory_analysis()
    return m.argument_size_in_bytes + m.output_size_in_bytes - m.alias_size_in_bytes + m.temp_size_in_bytes


def _mesh(devices: int) -> Mesh:
    return make_mesh(MeshConfig(data=1, fsdp=devices), jax.devices()[:devices])


def _batch(shape: ModelShape, rows: int, context: int) -> dict[str, np.ndarray]:
    tokens = np.random.default_rng(0).integers(0, shape.vocab, (1, rows, context + 1)).astype(np.int32)
    positions = np.broadcast_to(np.arange(context, dtype=np.int32), (1, rows, context))
    ones = np.ones((1, rows, context), np.int32)
    return {
        "tokens": tokens[..., :-1],
        "targets": tokens[..., 1:],
        "positions": positions,
        "segments": ones,
        "weights": ones.astype(np.float32),
    }


def _print(found: dict[str, Found]) -> None:
    naive = next(iter(found.values())).size
    print(f"{'each with all above it':56}{'MiB':>10}{'of naive':>10}{'loss':>12}")
    for name, f in found.items():
        print(f"{name:56}{f.size / 2**20:10.1f}{f.size / naive:10.1%}{f.loss:12.6f}")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="60m")
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--quick", action="store_true", help="the small model, 256 positions")
    parser.add_argument("--json", help="also write the result there")
    options = parser.parse_args()
    if options.quick:
        options.size, options.context = "6.5m", 256
    return options


if __name__ == "__main__":
    main()
