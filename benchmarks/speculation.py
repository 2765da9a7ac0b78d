"""Speculative decoding side by side: every drafter and controller against plain decoding, and against transformers.

    python benchmarks/speculation.py [--batch 1 4 16 32] [--temperature 0 1] [--quick] [--json FILE] [--plot FILE]
    python benchmarks/speculation.py --folder HUGGING_FACE_DIRECTORY [--prompts FILE]
    python benchmarks/speculation.py --random 6.5m [--dtype bfloat16]

The model is that of `configs/code_2m.yaml` (which see), trained first where `--run` is not there; prompts are the
first tokens of held-out rows, mostly from within a document. With `--folder` it is that of a Hugging Face directory,
on HumanEval's prompts (or FILE's) of at most 128 tokens; with `--random`, one of untrained weights. All variants of
one batch size and temperature take turns; each ratio to `off` is the geometric mean over the rounds, with a 95 %
interval of paired differences; those that choose by themselves have some rounds to learn in before, and are set beside
the best fixed choice, and beside what their own table says of the best one. Loops, completions whose end repeats, are
left out of calls and acceptance (not of tokens a second), and their share is stated. With the extra `parity`,
transformers decodes the same weights in a process of its own: `generate` in batches; at batch 1 prompt lookup, and the
draft model, if there is one, as its assistant. No token ends a completion: ours have lengths of their own, even
between half of `--new` and one and a half, since what is decoded for learning ends at different times; theirs all have
`--new`, so that none of a batch waits for the longest.
"""

import argparse
import platform
import statistics
import tempfile
import time
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import code_model
import jax
import numpy as np
import subjects
from results import paired, plot, report
from shapes import SIZES
from subjects import Subject
from with_transformers import Transformers

from tlt_jax.decode.admission import Request
from tlt_jax.decode.controller import CONTROLLERS, Controller, Fixed, choices_of
from tlt_jax.decode.engine import Engine
from tlt_jax.decode.propose import OFF
from tlt_jax.decode.rollout import Rollout, joined, rollout_metrics
from tlt_jax.decode.sampling import Draws
from tlt_jax.decode.verify import VERIFIERS

LENGTHS = (3, 5, 7)
AUTO = "auto, "


def main() -> None:
    options = _options()
    values: dict[str, Any] = {}
    ratios: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as scratch:
        subject = _subject(options, Path(scratch))
        theirs = None if options.no_transformers else Transformers(subject.folder, options.new, options.dtype)
        for batch, temperature in product(options.batch, options.temperature):
            where = f"batch {batch}, temperature {temperature:g}"
            values[where], ratios[where] = _compare(subject, batch, temperature, theirs, options)
            _print(where, values[where], ratios[where])
        if theirs is not None:
            theirs.end()
    names = ("jax", "jaxlib", "flax", "numpy") + (() if theirs is None else ("torch", "transformers"))
    machine = f"{jax.device_count()} x {jax.devices()[0].device_kind}, {platform.machine()}"
    report("speculation", machine, names, values, ratios, options.json)
    if options.plot:
        plot(ratios, "tokens a second to off", options.plot)


def _subject(options: argparse.Namespace, scratch: Path) -> Subject:
    if options.random:
        folder = None if options.no_transformers else scratch
        return subjects.random_weights(options.random, options.dtype, folder, options.devices)
    if options.folder:
        return subjects.from_folder(Path(options.folder), Path(options.prompts), options.devices)
    return subjects.trained(Path(options.run), options.devices)


def _compare(
    subject: Subject, batch: int, temperature: float, theirs: Transformers | None, options: argparse.Namespace
) -> tuple[dict[str, Any], dict[str, Any]]:
    """({variant: figures}, {variant: ratio to off, and its interval}) after `rounds` rounds of all in turn."""
    draws: Draws = "sampled" if temperature else "greedy"
    config, models, prompts, longest = subject.config, subject.models, subject.prompts, subject.longest_prompt
    pools = config.speculation.pool_sizes
    engines = {
        name: code_model.engine(
            config, models, controller, batch, 3 * options.new // 2, options.verification, draws, longest, sizes=pools
        )
        for name, controller in _variants(subject.drafters, options.lengths, options.controllers)
    }
    count = max(options.sequences, options.turns * batch)
    speeds: dict[str, list[float]] = {name: [] for name in engines}
    rollouts: dict[str, list[Rollout]] = {name: [] for name in engines}
    besides: dict[str, list[float]] = {name: [] for name in engines}
    views = {
        name: engine.view(models.policy, models.exit, models.eagle, models.draft_model)
        for name, engine in engines.items()
    }
    for name, engine in engines.items():
        engine.warm_up(views[name])
    for round in range(-options.learn, options.rounds + 1):  # 0 is not counted either: pages and caches get warm
        some = [prompts[(round * count + i) % len(prompts)] for i in range(count)]
        lengths = np.random.default_rng(abs(round)).integers(options.new // 2, 3 * options.new // 2 + 1, count)
        learning = round < 0
        for name, engine in engines.items():
            if learning and not name.startswith(AUTO):
                continue
            requests = [
                Request(prompt, int(length), 1_000_000 * abs(round) + i, temperature)
                for i, (prompt, length) in enumerate(zip(some, lengths, strict=True))
            ]
            start = time.perf_counter()
            rollout = engine.run(views[name], requests)
            if round > 0:
                seconds, tokens = time.perf_counter() - start, int(rollout.completion_length_B.sum())
                speeds[name].append(tokens / seconds)
                besides[name].append((seconds - engine.round_seconds) / tokens)
                rollouts[name].append(rollout)
        for name in theirs.ways(batch) if theirs is not None and not learning else ():
            speed = theirs.speed(name, some, batch, temperature)
            if round > 0:
                speeds.setdefault(name, []).append(speed)
    values = {name: {"tokens_per_second": statistics.median(found)} for name, found in speeds.items()}
    for name, engine in engines.items():
        values[name] |= _figures(engine, joined(rollouts[name]))
    ratios = {name: paired(found, speeds["off"]) for name, found in speeds.items()}
    fixed = [name for name in engines if not name.startswith(AUTO)]
    best = max(fixed, key=lambda name: ratios[name]["ratio"])
    for name in engines.keys() - fixed:
        rows = [row for row in values[name]["table"] if row["size"] == engines[name].slots]
        table = {(row["drafter"], row["draft_length"]): row["tokens_per_second"] for row in rows}
        values[name]["best_fixed"], values[name]["to_best_fixed"] = best, paired(speeds[name], speeds[best])
        values[name]["predicted_to_off"] = _predicted(table, statistics.median(besides[name]))
    return values, ratios


def _predicted(table: dict[tuple[str, int], float], besides: float) -> float:
    """The best choice's speed to that of `off`, from what a table says of their rounds' tokens a second, and the
    seconds a token that prompts and the starts of blocks take with either."""
    return (besides + 1.0 / table[OFF.drafter, 0]) / (besides + 1.0 / max(table.values()))


def _variants(drafters: list[str], lengths: list[int], controllers: list[str]) -> Iterator[tuple[str, Controller]]:
    for choice in choices_of(drafters, lengths):
        yield "off" if choice == OFF else f"{choice.drafter} {choice.draft_length}", Fixed(choice)
    for name in controllers:
        yield f"{AUTO}{name}", CONTROLLERS[name](choices_of(drafters, lengths), 0)


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
        if "to_best_fixed" in row:
            best = row["to_best_fixed"]
            text += f"  to {row['best_fixed']} {best['ratio']:.2f} ({best['low']:.2f}-{best['high']:.2f})"
            text += f"; its table says {row['predicted_to_off']:.2f} of off"
        print(text)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", default="runs/code_2m", help="run directory of the model; trained if it is not there")
    parser.add_argument("--folder", help="a Hugging Face directory, instead of a run's model")
    parser.add_argument("--prompts", default=str(subjects.HUMANEVAL), help="its prompts: JSON lines, gzipped or not")
    parser.add_argument("--random", choices=SIZES, help="a model of this size with random weights, instead")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"], help="of random weights")
    parser.add_argument("--devices", type=int, default=1, help="of a CPU, simulated, over which a batch is split")
    parser.add_argument("--new", type=int, default=128, help="tokens of a completion: ours on average, theirs all")
    parser.add_argument("--controllers", nargs="*", choices=CONTROLLERS, default=list(CONTROLLERS))
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 4, 16, 32], help="sequences decoded together")
    parser.add_argument("--temperature", type=float, nargs="+", default=[0.0, 1.0])
    parser.add_argument("--lengths", type=int, nargs="+", default=list(LENGTHS), help="draft lengths")
    parser.add_argument("--verification", default="block", choices=list(VERIFIERS))
    parser.add_argument("--rounds", type=int, default=5, help="in which all variants take turns")
    parser.add_argument("--learn", type=int, default=4, help="rounds before, in which the controllers alone learn")
    parser.add_argument("--sequences", type=int, default=4, help="of a round, at least")
    parser.add_argument(
        "--turns", type=int, default=4, help="batches of a round, at least: a queue over refilled slots"
    )
    parser.add_argument("--no-transformers", action="store_true", help="leave the extra `parity` out")
    parser.add_argument("--quick", action="store_true", help="batch 4, 2 rounds")
    parser.add_argument("--json", metavar="FILE", help="write the last line there too")
    parser.add_argument("--plot", metavar="FILE", help="draw the ratios there: .png, .svg or .pdf")
    options = parser.parse_args()
    if options.quick:
        options.batch, options.rounds = [4], 2
    return options


if __name__ == "__main__":
    main()
