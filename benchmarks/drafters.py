"""The drafters side by side on a trained model: the same output, for how many target calls, at what speed.

    python benchmarks/drafters.py --run runs/quickstart [--prompts N] [--repeats N] [--quick] [--json FILE]

Takes a run directory's exported model and held-out prompts. At temperature 0 every drafter must give the tokens of
plain decoding, or part only where its token comes within 1e-4 of the best. At temperature 1 the mean reward (quality)
and length must agree within their error. Runs of the drafters are interleaved; medians are printed.
"""

import argparse
import platform
import statistics
import time
from pathlib import Path

import jax
import numpy as np
from code_model import drafters_of
from divergence import CLOSE, parted
from results import report

from tlt_jax.config import Config, load_config
from tlt_jax.data import prepare
from tlt_jax.decode.admission import Request
from tlt_jax.decode.controller import Fixed
from tlt_jax.decode.engine import Engine
from tlt_jax.decode.propose import OFF, Choice, Rules
from tlt_jax.decode.rollout import Rollout, joined, rollout_metrics
from tlt_jax.decode.sampling import Draws
from tlt_jax.parallel.mesh import compute_dtype, make_mesh, set_up_devices
from tlt_jax.rl.rewards import is_valid
from tlt_jax.stages.models import Models, initial_models, model_shape


def main() -> None:
    options = _options()
    run = Path(options.run)
    config = load_config(run / "config.yaml", [f"model.init_from={run}/export"])
    set_up_devices(config.device)
    corpus = prepare(config.data, config.run.seed, str(run / "tokenizer.json"), lambda label, fraction: None)
    models = initial_models(
        config, model_shape(config.model, corpus.tokenizer.vocab_size), make_mesh(config.device.mesh)
    )
    prompts = corpus.held_out_tasks.prompts[: 32 if options.quick else options.prompts]
    drafters = drafters_of(models)
    values: dict[str, dict] = {}
    for temperature in (0.0, 1.0):
        draws: Draws = "sampled" if temperature else "greedy"
        engines = {drafter: _engine(config, models, drafter, draws, corpus.tokenizer.eos_id) for drafter in drafters}
        rollouts, speeds = _interleaved(
            engines, models, prompts, temperature, config, 1 if options.quick else options.repeats
        )
        for drafter, rollout in rollouts.items():
            row = rollout_metrics(rollout, engines[drafter].draft_length)
            row |= {
                "tokens_per_second": statistics.median(speeds[drafter]),
                **_judged(rollout, corpus.tokenizer.decode),
            }
            if temperature == 0.0:
                row |= parted(models.policy, rollouts["off"], rollout)
                row["same_tokens"] = row["largest_gap"] <= CLOSE
            values[f"{drafter} at temperature {temperature:g}"] = row
    _print(values)
    plain = {name: values[f"off at {name.split(' at ')[1]}"]["tokens_per_second"] for name in values}
    ratios = {name: row["tokens_per_second"] / plain[name] for name, row in values.items()}
    machine = f"{jax.device_count()} x {jax.devices()[0].device_kind}, {platform.machine()}"
    report("drafters", machine, ("jax", "jaxlib", "flax", "numpy"), values, ratios, options.json)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", required=True, help="a finished run directory")
    parser.add_argument("--prompts", type=int, default=512, help="held-out prompts, as far as there are")
    parser.add_argument("--repeats", type=int, default=3, help="interleaved rounds at each temperature")
    parser.add_argument("--quick", action="store_true", help="32 prompts, one round")
    parser.add_argument("--json", metavar="FILE", help="write the last line there too")
    return parser.parse_args()


def _engine(config: Config, models: Models, drafter: str, draws: Draws, eos: int) -> Engine:
    tasks, speculation = config.data.tasks, config.speculation
    choice = OFF if drafter == "off" else Choice(drafter, speculation.draft_length)
    return Engine(
        models.policy.shape,
        make_mesh(config.device.mesh),
        slots=speculation.slots,
        max_prompt=tasks.max_prompt_tokens,
        max_new=tasks.max_completion_tokens,
        eos=[eos],
        controller=Fixed(choice),
        rules=Rules(
            draws=draws,
            ngram_min=speculation.ngram_min,
            ngram_max=speculation.ngram_max,
            ngram_history=0,  # every round has the same prompts, and at temperature 0 the same completions
        ),
        dtype=compute_dtype(config.device),
        block_verifies=speculation.block_verifies,
        draft_shape=models.draft_model and models.draft_model.shape,
    )


def _interleaved(
    engines: dict[str, Engine],
    models: Models,
    prompts: list[np.ndarray],
    temperature: float,
    config: Config,
    repeats: int,
) -> tuple[dict[str, Rollout], dict[str, list[float]]]:
    """The rollouts of all rounds together (each round has seeds of its own; one round at temperature 0), and the
    tokens a second of each round after a first that compiles."""
    found: dict[str, list[Rollout]] = {drafter: [] for drafter in engines}
    speeds: dict[str, list[float]] = {drafter: [] for drafter in engines}
    for repeat in range(repeats + 1):
        for drafter, engine in engines.items():
            requests = [
                Request(prompt, config.data.tasks.max_completion_tokens, 1_000_000 * repeat + i, temperature)
                for i, prompt in enumerate(prompts)
            ]
            view = engine.view(models.policy, models.exit, models.eagle, models.draft_model)
            start = time.perf_counter()
            rollout = engine.run(view, requests)
            if repeat:
                speeds[drafter].append(rollout.completion_length_B.sum() / (time.perf_counter() - start))
                found[drafter].append(rollout)
    return {drafter: found[drafter][-1] if temperature == 0 else joined(found[drafter]) for drafter in engines}, speeds


def _judged(rollout: Rollout, decode) -> dict[str, float]:
    """Mean reward (share of valid completions) and length, each with its standard error."""
    valid = np.array(
        [
            is_valid(decode(row[:start]), decode(tokens), bool(ended))
            for row, start, tokens, ended in zip(
                rollout.tokens_BT, rollout.prompt_length_B, rollout.completions(), rollout.ended_B, strict=True
            )
        ],
        float,
    )
    length = rollout.completion_length_B.astype(float)
    root = len(valid) ** 0.5
    return {
        "reward": valid.mean(),
        "reward_error": valid.std() / root,
        "length": length.mean(),
        "length_error": length.std() / root,
    }


def _print(values: dict[str, dict]) -> None:
    heads = {"": 28, "calls/token": 12, "accepted": 10, "tokens/s": 10, "reward": 16, "length": 16, "loops": 8}
    print("".join(f"{head:>{width}}" for head, width in heads.items()), " same tokens as off")
    for name, row in values.items():
        same = (
            f"{row['divergences']} of {row['sequences']} part, gap {row['largest_gap']:.1e}"
            if "divergences" in row
            else ""
        )
        print(
            f"{name:28}{row['rollout/target_calls_per_token']:12.3f}{row['rollout/accepted_length']:10.2f}{row['tokens_per_second']:10.0f}"
            f"{row['reward']:9.3f} ±{row['reward_error']:.3f}{row['length']:10.2f} ±{row['length_error']:.2f}"
            f"{row['rollout/loop_fraction']:8.1%}  {same}"
        )


if __name__ == "__main__":
    main()
