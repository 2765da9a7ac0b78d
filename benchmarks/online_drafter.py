"""The eagle drafter trained online against the same drafter frozen, on the same rollouts of a policy that learns.

    python benchmarks/online_drafter.py --run DIR [--updates 50] [--quick] [--json FILE] [KEY=VALUE ...]

Takes a run directory's exported model, whose eagle is the warm start, and runs group-relative policy optimisation from
it (the stage `finetune`, in a scratch directory). Before each update both drafters are asked about its very rollouts:
the chance that a draft stands, 1 - TV(p, q), by its place in a chain, under the policy as it is then.
"""

import argparse
import platform
import tempfile
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from results import report
from scipy import stats

from tlt_jax.config import load_config
from tlt_jax.models.transformer import hidden_states
from tlt_jax.parallel.hosts import to_host
from tlt_jax.parallel.mesh import set_up_devices
from tlt_jax.stages.finetune import GroupPolicy
from tlt_jax.stages.loop import run_phase
from tlt_jax.stages.models import checked_shape, initial_models
from tlt_jax.stages.opening import open_run
from tlt_jax.stages.rollouts import Sampler
from tlt_jax.train.distillation import DrafterTerms, drafters_batch, predicting
from tlt_jax.train.eagle_loss import Chains, eagle_loss, places


class Paired(GroupPolicy):
    """The phase, with a look at both drafters before each update."""

    def __init__(self, run: Any, sampler: Sampler, frozen: Any, drafts: int):
        super().__init__(run, sampler)
        self.frozen, self.pairs, train_step = frozen, [], self.update
        temperature, chains = run.config.sampling.temperature, Chains(drafts, 4)
        terms = DrafterTerms(temperature, 0.0, chains)

        @jax.jit
        def look(policy: Any, eagles: Any, batch: Any) -> Any:
            prepared = {**batch, **drafters_batch(batch, terms, jnp.int32(0))}
            b = {name: array[0] for name, array in prepared.items()}
            states = hidden_states(policy, *predicting(b).values(), dtype=jnp.float32)
            sequences, at_PK = tuple(predicting(b).values()), places(states[1].shape[1], chains, b["eagle_offset"])
            return [
                eagle_loss(policy, eagle, states, sequences, b["eagle_weights"], at_PK, temperature)[1]
                for eagle in eagles
            ]

        def update(state: Any, batch: Any, progress: Any, frozen: Any = None) -> Any:
            with jax.set_mesh(run.mesh):
                self.pairs.append(to_host(look(state.params["policy"], (state.params["eagle"], self.frozen), batch)))
            return train_step(state, batch, progress, frozen)

        update.figures = train_step.figures  # type: ignore[attr-defined]
        self.update = update  # type: ignore[assignment]


def main() -> None:
    options = _options()
    run_dir = Path(options.run)
    with tempfile.TemporaryDirectory() as scratch:
        steps = -(-options.updates // options.minibatches)
        overrides = [
            f"model.init_from={run_dir}/export", f"run.output_dir={scratch}", "run.name=online", "run.trackers=[]",
            "stages=[finetune]", "budget.unit=steps", f"budget.total={steps}", "finetune.warmup.share=0.0",
            f"finetune.policy.minibatches={options.minibatches}", "speculation.drafter=eagle", "run.export=false",
            "finetune.policy.epochs=1", "finetune.policy.accumulation=1",
        ]  # fmt: skip
        config = load_config(run_dir / "config.yaml", [*overrides, *options.overrides])
        set_up_devices(config.device)
        with open_run(config) as run:
            shape = checked_shape(config, run.corpus.tokenizer.vocab_size, run.mesh)
            run.begin(shape)
            run.models = initial_models(config, shape, run.mesh)
            frozen = jax.tree.map(jnp.copy, run.models.eagle)
            phase = Paired(run, Sampler(run, shape), frozen, options.drafts)
            run_phase(run, phase)
    pairs = np.array(phase.pairs)[: options.updates]  # [updates, online or frozen, place]
    _report(pairs, options)


def _report(pairs: np.ndarray, options: argparse.Namespace) -> None:
    survival = pairs.cumprod(axis=2).sum(axis=2)
    chain = "drafts that stand of a chain, were its places independent"
    values, half = {}, len(pairs) // 2
    for name, found in (("a first draft stands", pairs[:, :, 0]), (chain, survival)):
        gain = found[:, 0] - found[:, 1]
        # Updates that follow each other are alike: the interval is that of the means of five stretches of them.
        means = np.array([part.mean() for part in np.array_split(gain, 5)])
        error = stats.t.ppf(0.975, 4) * means.std(ddof=1) / 5**0.5
        values[name] = {
            "online": float(found[:, 0].mean()), "frozen": float(found[:, 1].mean()), "gain": float(gain.mean()),
            "low": float(gain.mean() - error), "high": float(gain.mean() + error),
            "gain_in_the_second_half": float(gain[half:].mean()), "updates_with_a_gain": int((gain > 0).sum()),
        }  # fmt: skip
        row = values[name]
        print(
            f"{name}: online {row['online']:.4f}, frozen {row['frozen']:.4f}; gain {row['gain']:.4f}"
            f" ({row['low']:.4f} to {row['high']:.4f}), in the second half {row['gain_in_the_second_half']:.4f};"
            f" in {row['updates_with_a_gain']} of {len(gain)} updates"
        )
    machine = f"{jax.device_count()} x {jax.devices()[0].device_kind}, {platform.machine()}"
    report("online_drafter", machine, ("jax", "jaxlib", "flax", "numpy"), values, {}, options.json)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", required=True, help="a finished run directory with an eagle")
    parser.add_argument("--updates", type=int, default=50, help="5 at least")
    parser.add_argument("--minibatches", type=int, default=2, help="updates a rollout")
    parser.add_argument("--drafts", type=int, default=5, help="places of a chain that are looked at")
    parser.add_argument("--quick", action="store_true", help="10 updates")
    parser.add_argument("--json", metavar="FILE", help="write the last line there too")
    parser.add_argument("overrides", nargs="*", help="keys of the config, as KEY=VALUE")
    options = parser.parse_args()
    options.updates = max(options.updates, 5)  # the interval is made of five stretches
    if options.quick:
        options.updates = 10
    return options


if __name__ == "__main__":
    main()
