"""Stage 1: next-token training on packed rows of the corpus."""

from tlt_jax.stages.evaluate import HeldOutLoss, bits_per_byte, evaluate_completions
from tlt_jax.stages.loop import PhaseState, models_of, run_phase
from tlt_jax.stages.rollouts import Sampler
from tlt_jax.stages.run import Run
from tlt_jax.stages.supervised import Supervised


class Pretrain(Supervised):
    """Next-token training; evaluated by held-out loss, bits per byte and completions."""

    stage = name = section = "pretrain"

    def __init__(self, run: Run, sampler: Sampler):
        config = run.config.pretrain
        super().__init__(run, sampler, config, run.corpus.train, run.config.run.seed)
        self.rows = config.eval_rows
        self.held_out = HeldOutLoss(run, run.corpus.held_out, self.rows)

    def evaluate(self, state: PhaseState, when: str) -> tuple[PhaseState, dict[str, float]]:
        loss = self.held_out(models_of(state).policy)
        bits = bits_per_byte(self.run, self.run.corpus.held_out, self.rows, loss)
        metrics = {"eval/loss": loss, "eval/bits_per_byte": bits}
        if when != "during" and len(self.run.corpus.held_out_tasks):
            metrics |= evaluate_completions(self.run, self.sampler, models_of(state), self.stage, self.name, when)
        return state, metrics


def run_pretrain(run: Run, sampler: Sampler) -> None:
    """Runs the stage, from the run's models to the run's models."""
    run_phase(run, Pretrain(run, sampler))
