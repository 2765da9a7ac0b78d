"""A program: trains and decodes on meshes of eight simulated CPU devices and of one; writes what came out as JSON."""

import hashlib
import json
import os
import sys
from pathlib import Path

# Many programs that each run a few times: compiling fast matters, running fast does not.
os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
)

import jax

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)
if folder := os.environ.get("TLT_JAX_TEST_COMPILED"):
    jax.config.update("jax_compilation_cache_dir", folder)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)

import numpy as np  # noqa: E402
from jax.sharding import AxisType, NamedSharding  # noqa: E402
from jax.sharding import PartitionSpec as P  # noqa: E402

from support import tiny  # noqa: E402
from support.collectives import collectives  # noqa: E402
from tlt_jax.config.stage_sections import OptimizerConfig  # noqa: E402
from tlt_jax.decode.admission import Request  # noqa: E402
from tlt_jax.decode.controller import Fixed  # noqa: E402
from tlt_jax.decode.engine import Engine  # noqa: E402
from tlt_jax.decode.propose import Choice  # noqa: E402
from tlt_jax.models.declare import flatten, initialise, shardings  # noqa: E402
from tlt_jax.models.heads import ShallowExit  # noqa: E402
from tlt_jax.models.transformer import Transformer  # noqa: E402
from tlt_jax.parallel.mesh import MESH_AXES  # noqa: E402
from tlt_jax.parallel.sharding import put_batch  # noqa: E402
from tlt_jax.train.losses import next_token_objective  # noqa: E402
from tlt_jax.train.state import Role, new_state  # noqa: E402
from tlt_jax.train.step import make_update  # noqa: E402

ROWS, LENGTH, STEPS, DRAFTS = 8, 8, 20, 3
BUILD = {"policy": lambda d: Transformer(tiny.SHAPE, d), "exit": lambda d: ShallowExit(tiny.SHAPE, d)}
# By hand: the width over fsdp, heads, hidden units and vocabulary over tensor, layers nowhere.
EXPECTED = {
    "policy/embedding": P("tensor", "fsdp"),
    "policy/final_norm": P("fsdp"),
    "policy/layers/attention_norm": P(None, "fsdp"),
    "policy/layers/mlp_norm": P(None, "fsdp"),
    "policy/layers/attention/query": P(None, "fsdp", "tensor", None),
    "policy/layers/attention/key": P(None, "fsdp", "tensor", None),
    "policy/layers/attention/value": P(None, "fsdp", "tensor", None),
    "policy/layers/attention/out": P(None, "tensor", None, "fsdp"),
    "policy/layers/mlp/gate": P(None, "fsdp", "tensor"),
    "policy/layers/mlp/up": P(None, "fsdp", "tensor"),
    "policy/layers/mlp/down": P(None, "tensor", "fsdp"),
    "exit/down": P("fsdp", None),
    "exit/up": P(None, "fsdp"),
    "exit/norm": P("fsdp"),
}


def misplaced(state, mesh) -> tuple[list[str], int]:
    """The arrays that do not lie as EXPECTED says (no parameter, no moment: replicated), and how many there are."""
    leaves = {f"params/{path}": a for path, a in flatten(state.params).items()} | {
        f"opt/{path}": a for path, a in flatten(state.opt).items()
    }
    shapes = {path: a.shape for path, a in flatten(state.params).items()}
    wrong = []
    for path, array in leaves.items():
        role, _, rest = path.partition("/")[2].partition("/")
        owner = next(
            (
                o
                for o in EXPECTED
                if o.startswith(role + "/") and f"/{rest}".endswith(o.removeprefix(role)) and shapes[o] == array.shape
            ),
            None,
        )
        wanted = NamedSharding(mesh, EXPECTED[owner] if owner else P())
        if not array.sharding.is_equivalent_to(wanted, array.ndim):
            wrong.append(f"{path}: {array.sharding.spec}, expected {wanted.spec}")
    return wrong, len(leaves)


def batch() -> dict[str, np.ndarray]:
    tokens = np.random.default_rng(0).integers(0, 50, (ROWS, LENGTH + 1)).astype(np.int32)
    weights = np.ones((ROWS, LENGTH), np.float32)
    weights[3], weights[5, 2:] = 0, 0
    positions = np.tile(np.arange(LENGTH, dtype=np.int32), (ROWS, 1))
    made = {
        "tokens": tokens[:, :-1],
        "targets": tokens[:, 1:],
        "segments": np.ones((ROWS, LENGTH), np.int32),
        "positions": positions,
        "weights": weights,
    }
    return {name: array[None] for name, array in made.items()}


def train(mesh) -> dict:
    optimizers = {
        "policy": OptimizerConfig(name="muon", learning_rate=0.02),
        "exit": OptimizerConfig(learning_rate=0.02),
    }
    roles = {name: Role(BUILD[name], optimizers[name]) for name in BUILD}
    params = {name: initialise(BUILD[name], mesh, jax.random.key(i)) for i, name in enumerate(BUILD)}
    initial = hashlib.sha256(b"".join(np.asarray(a).tobytes() for a in flatten(params).values())).hexdigest()
    state = new_state(roles, params, mesh)
    before, checked = misplaced(state, mesh)
    update = make_update(
        next_token_objective(dtype=np.dtype("float32"), remat="none", exit_weight=0.3, exit_stride=4), roles, mesh
    )
    losses, compiled, active = [], [], False

    def listen(event: str, duration: float, **_) -> None:
        if active and event == "/jax/core/compile/jaxpr_to_mlir_module_duration":
            compiled.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    placed = put_batch(mesh, batch(), leading=1)
    for step in range(STEPS):
        state, metrics = update(state, placed, np.float32(0.1 + 0.045 * step))
        losses.append(float(metrics["train/loss"]))
        active = True
    active = False
    after, _ = misplaced(state, mesh)
    final = np.concatenate([np.asarray(a).ravel() for a in flatten(state.params).values()])
    return {
        "update": collectives(update.lower(state, placed, np.float32(0.5)).compile().as_text()),
        "final": [float(value) for value in final],
        "initial": initial,
        "losses": losses,
        "misplaced_before": before,
        "misplaced_after": after,
        "checked": checked,
        "compiled_after_the_first_step": len(compiled),
    }


def decode(mesh) -> dict:
    policy = jax.device_put(tiny.transformer(seed=4, scale=3.0), shardings(BUILD["policy"], mesh))
    exit = jax.device_put(tiny.shallow_exit(scale=2.0), shardings(BUILD["exit"], mesh))
    engine = Engine(
        tiny.SHAPE,
        mesh,
        slots=8,
        max_prompt=6,
        max_new=10,
        eos=[17],
        controller=Fixed(Choice("shallow", DRAFTS)),
        dtype=np.dtype("float32"),
        block_verifies=3,
    )
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, 50, 1 + i % 6).astype(np.int32) for i in range(12)]
    requests = [Request(prompt, 10, i, temperature) for temperature in (0.0, 1.0) for i, prompt in enumerate(prompts)]
    rollout = engine.run(engine.view(policy, exit), requests)
    counts = {
        name: getattr(rollout, name).tolist() for name in ("length_B", "target_calls_B", "drafted_B", "accepted_B")
    }
    view = engine.whole(engine.view(policy, exit))
    return {
        "block": collectives(engine.lower_block(engine.view(policy, exit)).compile().as_text()),
        "view": {path: list(a.addressable_shards[0].data.shape) for path, a in flatten(view).items()},
        "tokens": {"0.0": rollout.tokens_BT[:12].tolist(), "1.0": rollout.tokens_BT[12:].tolist()},
        "counts": counts,
    }


def main(out: Path) -> None:
    results = {}
    for sizes in ((1, 1, 1), (8, 1, 1), (2, 2, 2), (1, 4, 2)):
        devices = jax.devices()[: int(np.prod(sizes))]
        mesh = jax.make_mesh(sizes, MESH_AXES, axis_types=(AxisType.Auto,) * 3, devices=devices)
        results["x".join(map(str, sizes))] = {**train(mesh), **decode(mesh)}
    out.write_text(json.dumps(results))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
