"""Heavy-tailed lengths: a queue over refilled slots against static batches, and the automatic drafter on top.

    python benchmarks/tails.py [--run DIR] [--slots 16] [--requests 256] [--rounds 5] [--quick] [--json FILE]

Completions' lengths are log-normal, the longest 20 times the median. A static batch takes as many requests as there
are slots, and the next batch begins when its longest is done; the queue's pool is refilled, and shrinks as it empties.
The variants take turns; each ratio is the geometric mean over the rounds, with a 95 % interval of paired differences.
"""

import argparse
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import code_model
import jax
import numpy as np
from results import paired, report

from tlt_jax.decode.admission import Request
from tlt_jax.decode.controller import CostTable, Fixed, choices_of
from tlt_jax.decode.engine import Engine, Leaves
from tlt_jax.decode.propose import OFF
from tlt_jax.decode.sampling import Draws

MEDIAN, TAIL = 9, 20  # tokens; the longest, in medians


def main() -> None:
    options = _options()
    config, models, corpus = code_model.load(Path(options.run))
    prompts = code_model.prompts(corpus, options.requests)
    lengths = _lengths(options.requests)
    choices = choices_of([name for name in code_model.drafters_of(models) if name != "off"], [3, 5, 7])
    draws: Draws = "sampled" if options.temperature else "greedy"
    engines = {
        name: code_model.engine(config, models, controller, options.slots, MEDIAN * TAIL, "block", draws, sizes=sizes)
        for name, controller, sizes in (
            ("static batches", Fixed(OFF), 1),
            ("slots, one size", Fixed(OFF), 1),
            ("slots", Fixed(OFF), 3),
            ("slots, auto", CostTable(choices), 3),
        )
    }
    views = {
        name: engine.view(models.policy, models.exit, models.eagle, models.draft_model)
        for name, engine in engines.items()
    }
    for name, engine in engines.items():
        engine.warm_up(views[name])
    speeds: dict[str, list[float]] = {name: [] for name in engines}
    for round in range(options.rounds + 1):  # the first is not counted: pages and caches get warm, drafts are seen
        requests = [
            Request(prompt, int(length), 1_000_000 * round + i, options.temperature)
            for i, (prompt, length) in enumerate(zip(prompts, lengths, strict=True))
        ]
        for name, engine in engines.items():
            run: Callable[[Engine, Leaves, Sequence[Request]], None] = _static if name == "static batches" else _queue
            start = time.perf_counter()
            run(engine, views[name], requests)
            if round:
                speeds[name].append(lengths.sum() / (time.perf_counter() - start))
    values = {name: {"tokens_per_second": statistics.median(found)} for name, found in speeds.items()}
    ratios = {
        "slots to static batches": paired(speeds["slots"], speeds["static batches"]),
        "of these, slots of one size": paired(speeds["slots, one size"], speeds["static batches"]),
        "auto to off in slots": paired(speeds["slots, auto"], speeds["slots"]),
    }
    for name, row in values.items():
        print(f"{name:20}{row['tokens_per_second']:9.0f} tokens/s")
    for name, row in ratios.items():
        print(f"{name:28}{row['ratio']:6.2f} ({row['low']:.2f} to {row['high']:.2f})")
    machine = f"{jax.device_count()} x {jax.devices()[0].device_kind}, {platform.machine()}"
    report("tails", machine, ("jax", "jaxlib", "flax", "numpy"), values, ratios, options.json)


def _lengths(count: int) -> np.ndarray:
    """Log-normal, of median MEDIAN; the longest of `count` is TAIL medians."""
    drawn = np.random.default_rng(0).standard_normal(count)
    drawn = (drawn - np.median(drawn)) / (drawn.max() - np.median(drawn))
    return np.maximum(np.rint(MEDIAN * TAIL**drawn), 1).astype(int)


def _queue(engine: Engine, view: Leaves, requests: Sequence[Request]) -> None:
    engine.run(view, requests)


def _static(engine: Engine, view: Leaves, requests: Sequence[Request]) -> None:
    for first in range(0, len(requests), engine.slots):
        engine.run(view, requests[first : first + engine.slots])


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", default="runs/code_2m", help="run directory of the model; trained if it is not there")
    parser.add_argument("--slots", type=int, default=16, help="sequences decoded together")
    parser.add_argument("--requests", type=int, default=256, help="completions a round")
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--rounds", type=int, default=5, help="in which all variants take turns")
    parser.add_argument("--quick", action="store_true", help="64 requests, 2 rounds")
    parser.add_argument("--json", metavar="FILE", help="write the last line there too")
    options = parser.parse_args()
    if options.quick:
        options.requests, options.rounds = 64, 2
    return options


if __name__ == "__main__":
    main()
