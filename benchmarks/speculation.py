"""Speculative decoding side by side: every drafter and controller against plain decoding, and against transformers.

    python benchmarks/speculation.py [--batch 1 4 16 32] [--temperature 0 1] [--quick] [--json FILE]

The model is that of `configs/code_2m.yaml` (which see), trained first where `--run` is not there; prompts are the
first tokens of held-out rows, mostly from within a document. All variants of one batch size and temperature take turns;
each ratio to `off` is the geometric mean over the rounds, with a 95 % interval of paired differences. Loops,
completions whose end repeats, are left out of calls and acceptance (not of tokens a second), and their share is stated.
With the extra `parity`, transformers decodes the same weights in a process of its own: `generate` in batches, and
prompt lookup at batch 1.
"""

import argparse
import json
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import code_model
import jax
import numpy as np
from results import paired, report

from tlt_jax.config.schema import Config
from tlt_jax.decode.controller import CONTROLLERS, Controller, Fixed, choices_of
from tlt_jax.decode.engine import Engine, Request
from tlt_jax.decode.propose import OFF
from tlt_jax.decode.rollout import Rollout, joined, rollout_metrics
from tlt_jax.decode.sampling import Draws
from tlt_jax.decode.verify import VERIFIERS
from tlt_jax.stages.models import Models

NEW = 128
LENGTHS = (3, 5, 7)
THEIRS = {"transformers": {}, "transformers, prompt lookup": {"prompt_lookup_num_tokens": 5}}


def main() -> None:
    options = _options()
    if options.child:
        _serve_transformers(options.child)
        return
    run = Path(options.run)
    config, models, corpus = code_model.load(run)
    prompts = code_model.prompts(corpus, 512)
    theirs = None if options.no_transformers else Transformers(run / "export")
    values: dict[str, Any] = {}
    ratios: dict[str, Any] = {}
    for batch in options.batch:
        for temperature in options.temperature:
            where = f"batch {batch}, temperature {temperature:g}"
            values[where], ratios[where] = _compare(config, models, prompts, batch, temperature, theirs, options)
            _print(where, values[where], ratios[where])
    if theirs is not None:
        theirs.end()
    names = ("jax", "jaxlib", "flax", "numpy") + (() if theirs is None else ("torch", "transformers"))
    machine = f"{jax.device_count()} x {jax.devices()[0].device_kind}, {platform.machine()}"
    report("speculation", machine, names, values, ratios, options.json)


def _compare(
    config: Config,
    models: Models,
    prompts: list[np.ndarray],
    batch: int,
    temperature: float,
    theirs: "Transformers | None",
    options: argparse.Namespace,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """({variant: figures}, {variant: ratio to off, and its interval}) after `rounds` rounds of all in turn."""
    draws: Draws = "sampled" if temperature else "greedy"
    engines = {
        name: code_model.engine(config, models, controller, batch, NEW, options.verification, draws)
        for name, controller in _variants(code_model.drafters_of(models), options.lengths)
    }
    count = max(options.sequences, 2 * batch)
    speeds: dict[str, list[float]] = {name: [] for name in engines}
    rollouts: dict[str, list[Rollout]] = {name: [] for name in engines}
    views = {name: engine.view(models.policy, models.exit, models.eagle) for name, engine in engines.items()}
    for name, engine in engines.items():
        engine.warm_up(views[name])
    for round in range(options.rounds + 1):  # the first is not counted: pages and caches get warm, controllers learn
        some = [prompts[(round * count + i) % len(prompts)] for i in range(count)]
        for name, engine in engines.items():
            requests = [Request(p, NEW, 1_000_000 * round + i, temperature) for i, p in enumerate(some)]
            start = time.perf_counter()
            rollout = engine.run(views[name], requests)
            if round:
                speeds[name].append(rollout.completion_length_B.sum() / (time.perf_counter() - start))
                rollouts[name].append(rollout)
        for name in THEIRS if theirs is not None else ():
            if name == "transformers" or batch == 1:
                speed = theirs.speed(some, batch, temperature, THEIRS[name])
                if round:
                    speeds.setdefault(name, []).append(speed)
    values = {name: {"tokens_per_second": statistics.median(found)} for name, found in speeds.items()}
    for name, engine in engines.items():
        values[name] |= _figures(engine, joined(rollouts[name]))
    return values, {name: paired(found, speeds["off"]) for name, found in speeds.items()}


def _variants(drafters: list[str], lengths: list[int]) -> Iterator[tuple[str, Controller]]:
    for choice in choices_of(drafters, lengths):
        yield "off" if choice == OFF else f"{choice.drafter} {choice.draft_length}", Fixed(choice)
    for name, controller in CONTROLLERS.items():
        yield f"auto, {name}", controller(choices_of(drafters, lengths), 0)


def _figures(engine: Engine, rollout: Rollout) -> dict[str, Any]:
    metrics = rollout_metrics(rollout, engine.mean_draft_length)
    names = ("target_calls_per_token", "accepted_length", "loop_fraction")
    figures = {name: metrics[f"rollout/{name}"] for name in names}
    mask = rollout.completion_mask_BT
    figures["nats_per_token"] = float(-(rollout.policy_logp_BT * mask).sum() / mask.sum())
    seen = engine.controller.seen
    figures["acceptance"] = {name: [float(share) for share in seen.acceptance(name)] for name in seen.kept}
    return figures | {"table": seen.table()}


def _print(where: str, values: dict[str, Any], ratios: dict[str, Any]) -> None:
    print(f"\n{where}")
    print(
        f"{'':28}{'tokens/s':>9}{'to off':>8}{'95 %':>14}{'calls/token':>13}{'accepted':>10}{'loops':>7}  by position"
    )
    for name, row in values.items():
        ratio = ratios[name]
        text = f"{name:28}{row['tokens_per_second']:9.0f}{ratio['ratio']:8.2f}"
        text += f"{ratio['low']:7.2f}-{ratio['high']:<6.2f}"
        if "accepted_length" in row:
            text += f"{row['target_calls_per_token']:13.3f}{row['accepted_length']:10.2f}{row['loop_fraction']:7.1%}"
            if len(row["acceptance"]) == 1:
                text += "  " + " ".join(f"{share:.2f}" for share in next(iter(row["acceptance"].values())))
        print(text)


class Transformers:
    """transformers' generate, in a process of its own, with as many threads as are best."""

    def __init__(self, folder: Path):
        self._process = subprocess.Popen(
            [sys.executable, __file__, "--child", str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def speed(self, prompts: list[np.ndarray], batch: int, temperature: float, options: dict[str, Any]) -> float:
        """Tokens a second of the better of one and two threads."""
        assert self._process.stdin is not None and self._process.stdout is not None
        asked = {"prompts": [p.tolist() for p in prompts], "batch": batch, "temperature": temperature} | {
            "options": options
        }
        self._process.stdin.write(json.dumps(asked) + "\n")
        self._process.stdin.flush()
        return float(self._process.stdout.readline())

    def end(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(timeout=60)


def _serve_transformers(folder: str) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    threads: dict[tuple[int, bool], int] = {}

    def run(asked: dict[str, Any], count: int) -> float:
        torch.set_num_threads(count)
        sampled = {"do_sample": True, "temperature": asked["temperature"], "top_k": 0} if asked["temperature"] else {}
        start, made = time.perf_counter(), 0
        with torch.inference_mode():
            for first in range(0, len(asked["prompts"]), asked["batch"]):
                ids = torch.tensor(asked["prompts"][first : first + asked["batch"]])
                out = model.generate(
                    ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW, min_new_tokens=NEW, pad_token_id=0,
                    **({"do_sample": False} | sampled), **asked["options"],
                )  # fmt: skip
                made += out.shape[0] * (out.shape[1] - ids.shape[1])
        return made / (time.perf_counter() - start)

    for line in sys.stdin:
        asked = json.loads(line)
        key = asked["batch"], bool(asked["options"])
        if key not in threads:
            few = {**asked, "prompts": asked["prompts"][: asked["batch"]]}
            threads[key] = max((1, 2), key=lambda count: run(few, count))
        print(run(asked, threads[key]), flush=True)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", default="runs/code_2m", help="run directory of the model; trained if it is not there")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 4, 16, 32], help="sequences decoded together")
    parser.add_argument("--temperature", type=float, nargs="+", default=[0.0, 1.0])
    parser.add_argument("--lengths", type=int, nargs="+", default=list(LENGTHS), help="draft lengths")
    parser.add_argument("--verification", default="block", choices=list(VERIFIERS))
    parser.add_argument("--rounds", type=int, default=5, help="in which all variants take turns")
    parser.add_argument("--sequences", type=int, default=4, help="of a round, at least; two batches at least")
    parser.add_argument("--no-transformers", action="store_true", help="leave the extra `parity` out")
    parser.add_argument("--quick", action="store_true", help="batch 4, 2 rounds")
    parser.add_argument("--json", metavar="FILE", help="write the last line there too")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.quick:
        options.batch, options.rounds = [4], 2
    return options


if __name__ == "__main__":
    main()
