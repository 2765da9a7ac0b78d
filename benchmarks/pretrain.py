"""Pretraining side by side: our update step against a plain loop in torch with transformers' Llama.

    python benchmarks/pretrain.py [--size 6.5m 60m] [--rounds 5] [--tunix PYTHON] [--quick] [--json FILE]

The same shape, batch (8 x 256 tokens), optimiser (AdamW, torch's fused) and clipping, in float32. Each side has a
process of its own for each way of using the cores (torch: threads; ours: simulated devices), its memory in huge pages;
the best way of each is found first, then they take turns. Medians are printed, and that of the rounds' ratios; beside
them the same weights' matrix products alone, on each side: what is left of a step when all else costs nothing. Needs
the extra `parity`. With `--tunix`, the interpreter of an environment that holds google-tunix, its trainer takes its
turns too.
"""

import argparse
import os
import platform
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from results import report

ROWS, CONTEXT, WARM = 8, 256, 2
WAYS = {"ours": (1, 2), "torch": (1, 2), "tunix": (1,)}  # one JAX device uses all cores
HUGE_PAGES = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}  # a step's buffers are new to the process each time
STEPS = {"6.5m": 6, "60m": 2}


def main() -> None:
    options = _options()
    if options.child:
        side, size, cores = options.child
        _serve(CHILDREN[side](size, int(cores)))
        return
    values: dict[str, Any] = {}
    ratios: dict[str, dict[str, float]] = {}
    pythons = {"ours": sys.executable, "torch": sys.executable} | ({"tunix": options.tunix} if options.tunix else {})
    for size in options.size:
        values[size], ratios[size] = _compare(size, pythons, options.rounds, 2 if options.quick else STEPS[size])
    packages = ("jax", "jaxlib", "flax", "optax", "torch", "transformers")
    report("pretrain", f"{os.cpu_count()} cores, {platform.machine()}", packages, values, ratios, options.json)


def _compare(size: str, pythons: dict[str, str], rounds: int, steps: int) -> tuple[dict[str, Any], dict[str, float]]:
    tokens = steps * ROWS * CONTEXT
    best: dict[str, Child] = {}
    trials: dict[str, dict[int, float]] = {}
    for side, python in pythons.items():
        ways = WAYS[side]
        children = {cores: Child(python, side, size, cores) for cores in ways}
        trials[side] = {cores: tokens / child.ask("steps", steps) for cores, child in children.items()}
        chosen = max(ways, key=lambda cores: trials[side][cores])
        best[side] = children.pop(chosen)
        for child in children.values():
            child.end()
    speeds: dict[str, list[float]] = {side: [] for side in best}
    for _ in range(rounds):
        for side, child in best.items():
            speeds[side].append(tokens / child.ask("steps", steps))
    rows = {}
    for side, child in best.items():
        speed = statistics.median(speeds[side])
        rows[side] = {
            "cores": child.cores,
            "tokens_per_second": speed,
            "lowest_and_highest": [min(speeds[side]), max(speeds[side])],
            "products_tokens_per_second": ROWS * CONTEXT / child.ask("products", 1),
            "matmul_gflops": child.ask("peak", 1),
            "gflops": child.ask("flops", 1) * speed / 1e9,
            "peak_memory_mib": child.ask("memory", 1),
            "trials": trials[side],
        }
        rows[side]["share_of_matmul_peak"] = rows[side]["gflops"] / rows[side]["matmul_gflops"]
        child.end()
    ratios = {
        side: statistics.median(a / b for a, b in zip(speeds["ours"], theirs, strict=True))
        for side, theirs in speeds.items()
        if side != "ours"
    }
    _print(size, rows, ratios)
    return rows, ratios


def _print(size: str, rows: dict[str, Any], ratios: dict[str, float]) -> None:
    heads = ("", "cores", "tokens/s", "products alone", "GFLOP/s", "of matmul peak", "peak MiB")
    print(f"{size}, batch {ROWS} x {CONTEXT}: ours is " + ", ".join(f"{r:.2f} of {side}" for side, r in ratios.items()))
    print("".join(f"{head:>16}" for head in heads))
    for side, row in rows.items():
        print(
            f"{side:>16}{row['cores']:>16}{row['tokens_per_second']:>16.0f}{row['products_tokens_per_second']:>16.0f}"
            f"{row['gflops']:>16.1f}{row['share_of_matmul_peak']:>16.1%}{row['peak_memory_mib']:>16.0f}"
        )


class Child:
    """A side's process: it builds its model once, and measures when asked."""

    def __init__(self, python: str, side: str, size: str, cores: int):
        self.cores = cores
        command = [python, __file__, "--child", side, size, str(cores)]
        path = os.pathsep.join(filter(None, (str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH"))))
        environment = {**os.environ, **HUGE_PAGES, "OMP_NUM_THREADS": str(cores), "PYTHONPATH": path}
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )

    def ask(self, what: str, count: int) -> float:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(f"{what} {count}\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer:
            raise SystemExit(f"a child ended: exit code {self._process.wait()}")
        return float(answer)

    def end(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(timeout=60)


def _serve(measures: dict[str, Callable[[int], float]]) -> None:
    for line in sys.stdin:
        what, count = line.split()
        print(measures[what](int(count)), flush=True)


def _timed(act: Callable[[], object]) -> float:
    start = time.perf_counter()
    act()
    return time.perf_counter() - start


def _memory(_: int) -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def _ours(size: str, cores: int) -> dict[str, Callable[[int], float]]:
    import jax

    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", cores)
    import jax.numpy as jnp
    import numpy as np
    from shapes import SIZES

    from tlt_jax.config.device_sections import MeshConfig
    from tlt_jax.config.stage_sections import OptimizerConfig
    from tlt_jax.models.declare import initialise
    from tlt_jax.models.transformer import Transformer
    from tlt_jax.parallel.mesh import make_mesh
    from tlt_jax.parallel.sharding import put_batch
    from tlt_jax.train.losses import next_token_objective
    from tlt_jax.train.state import Role, new_state
    from tlt_jax.train.step import make_update

    shape, mesh = SIZES[size], make_mesh(MeshConfig())
    roles = {"policy": Role(lambda declare: Transformer(shape, declare), OptimizerConfig(learning_rate=1e-3))}
    objective = next_token_objective(dtype=jnp.dtype("float32"), remat="none", exit_weight=0.0, exit_stride=1)
    update = make_update(objective, roles, mesh)
    state = new_state(roles, {"policy": initialise(roles["policy"].build, mesh, jax.random.key(0))}, mesh)
    tokens = np.random.default_rng(0).integers(0, shape.vocab, (1, ROWS, CONTEXT + 1)).astype(np.int32)
    ones = np.ones((1, ROWS, CONTEXT), np.int32)
    positions = np.broadcast_to(np.arange(CONTEXT, dtype=np.int32), ones.shape)
    batch = put_batch(
        mesh,
        {
            "tokens": tokens[..., :-1],
            "targets": tokens[..., 1:],
            "segments": ones,
            "positions": positions,
            "weights": ones.astype(np.float32),
        },
        leading=1,
    )

    def steps(count: int) -> float:
        nonlocal state
        for _ in range(WARM):
            state, _ = update(state, batch, np.float32(0.5))
        jax.block_until_ready(state)

        def run() -> None:
            nonlocal state
            for _ in range(count):
                state, _ = update(state, batch, np.float32(0.5))
            jax.block_until_ready(state)

        return _timed(run)

    return {"steps": steps, **_jax_measures(shape)}


def _tunix(size: str, _: int) -> dict[str, Callable[[int], float]]:
    import jax

    jax.config.update("jax_platforms", "cpu")
    import jax.numpy as jnp
    import numpy as np
    import optax
    from flax import nnx
    from shapes import SIZES
    from tunix.models.llama3.model import Llama3, ModelConfig
    from tunix.sft.peft_trainer import PeftTrainer, TrainingConfig, TrainingInput

    shape = SIZES[size]
    config = ModelConfig(
        num_layers=shape.layers,
        vocab_size=shape.vocab,
        embed_dim=shape.width,
        hidden_dim=shape.hidden,
        num_heads=shape.heads,
        head_dim=shape.head_dim,
        num_kv_heads=shape.kv_heads,
        rope_theta=int(shape.rope_theta),
        norm_eps=shape.norm_eps,
        weight_tying=True,
    )
    tokens = np.random.default_rng(0).integers(0, shape.vocab, (ROWS, CONTEXT)).astype(np.int32)
    example = TrainingInput(input_tokens=tokens, input_mask=np.ones_like(tokens))

    def model_input(given: Any) -> dict[str, Any]:
        causal = jnp.tril(jnp.ones((CONTEXT, CONTEXT), bool))
        return {
            "input_tokens": given.input_tokens,
            "input_mask": given.input_mask,
            "positions": jnp.broadcast_to(jnp.arange(CONTEXT), given.input_tokens.shape),
            "attention_mask": jnp.broadcast_to(causal, (ROWS, CONTEXT, CONTEXT)),
        }

    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3, 0.9, 0.95, weight_decay=0.0))
    with jax.make_mesh((1, 1), ("fsdp", "tp"), axis_types=(jax.sharding.AxisType.Auto,) * 2):
        model = Llama3(config, rngs=nnx.Rngs(0))
        trainer = PeftTrainer(model, optimizer, TrainingConfig(eval_every_n_steps=10**9))
        trainer = trainer.with_gen_model_input_fn(model_input)
        trainer.is_managed_externally = True  # train() may be called again

    def steps(count: int) -> float:
        with jax.make_mesh((1, 1), ("fsdp", "tp"), axis_types=(jax.sharding.AxisType.Auto,) * 2):
            trainer.train([example] * WARM)
            return _timed(lambda: trainer.train([example] * count))

    return {"steps": steps, **_jax_measures(shape)}


def _jax_measures(shape: Any) -> dict[str, Callable[[int], float]]:
    """What JAX's sides measure beside their steps."""
    import jax
    import jax.numpy as jnp
    from shapes import matrix_products

    from tlt_jax.observe.utilisation import training_flops

    def products(_: int) -> float:
        shapes = sorted(set(all_products := matrix_products(shape, ROWS * CONTEXT)))
        pairs = {s: (jnp.ones(s[:2]), jnp.ones(s[1:])) for s in shapes}
        dot = jax.jit(jnp.dot)
        seconds = {}
        for s, (a, b) in pairs.items():
            dot(a, b).block_until_ready()
            seconds[s] = min(_timed(lambda a=a, b=b: dot(a, b).block_until_ready()) for _ in range(3))
        return sum(seconds[s] for s in all_products)

    def peak(_: int) -> float:
        a, dot = jnp.ones((2048, 2048)), jax.jit(jnp.dot)
        dot(a, a).block_until_ready()
        return 2 * 2048**3 / min(_timed(lambda: dot(a, a).block_until_ready()) for _ in range(5)) / 1e9

    flops = training_flops(shape, CONTEXT)
    return {"products": products, "peak": peak, "flops": lambda _: flops, "memory": _memory}


def _torch(size: str, cores: int) -> dict[str, Callable[[int], float]]:
    import torch
    import transformers
    from shapes import SIZES, matrix_products

    from tlt_jax.observe.utilisation import training_flops

    torch.set_num_threads(cores)
    torch.manual_seed(0)
    shape = SIZES[size]
    config = transformers.LlamaConfig(
        vocab_size=shape.vocab,
        hidden_size=shape.width,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        intermediate_size=shape.hidden,
        tie_word_embeddings=True,
        attn_implementation="sdpa",
    )
    model = transformers.LlamaForCausalLM(config).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.0, fused=True)
    tokens = torch.randint(0, shape.vocab, (ROWS, CONTEXT + 1))

    def step() -> None:
        logits = model(tokens[:, :-1], use_cache=False).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    def steps(count: int) -> float:
        for _ in range(WARM):
            step()
        return _timed(lambda: [step() for _ in range(count)])

    def products(_: int) -> float:
        all_products = matrix_products(shape, ROWS * CONTEXT)
        seconds = {}
        for m, k, n in set(all_products):
            a, b = torch.ones(m, k), torch.ones(k, n)
            a @ b
            seconds[m, k, n] = min(_timed(lambda a=a, b=b: a @ b) for _ in range(3))
        return sum(seconds[product] for product in all_products)

    def peak(_: int) -> float:
        a = torch.ones(2048, 2048)
        a @ a
        return 2 * 2048**3 / min(_timed(lambda: a @ a) for _ in range(5)) / 1e9

    flops = training_flops(shape, CONTEXT)
    return {"steps": steps, "products": products, "peak": peak, "flops": lambda _: flops, "memory": _memory}


CHILDREN = {"ours": _ours, "torch": _torch, "tunix": _tunix}


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", nargs="+", choices=STEPS, default=list(STEPS))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tunix", metavar="PYTHON", help="the interpreter of an environment that holds google-tunix")
    parser.add_argument("--quick", action="store_true", help="the small model, two rounds of two steps")
    parser.add_argument("--json", help="also write the result there")
    parser.add_argument("--child", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.quick:
        options.size, options.rounds = ["6.5m"], 2
    return options


if __name__ == "__main__":
    main()
