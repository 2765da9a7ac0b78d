"""How many copies of a model are in memory at once: in each phase, when it goes on and when it goes back; and that the
memory plan counts as many. What the phases compute is left out."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import tiny

from tlt_jax.checkpoint.store import Store
from tlt_jax.config import load_config
from tlt_jax.decode.loop import empty_slots
from tlt_jax.decode.propose import Rules
from tlt_jax.models.declare import flatten
from tlt_jax.models.decode_view import empty_cache
from tlt_jax.stages import insight
from tlt_jax.stages.align import PPO
from tlt_jax.stages.distill import Distill
from tlt_jax.stages.finetune import GroupPolicy, Warmup
from tlt_jax.stages.loop import Phase, PhaseState
from tlt_jax.stages.memory import memory, parameters
from tlt_jax.stages.models import abstract_models, initial_models
from tlt_jax.stages.pipeline import run_all
from tlt_jax.stages.pretrain import Pretrain
from tlt_jax.stages.reward_model import RewardModel
from tlt_jax.stages.run import Interrupted, Run

ROOT = Path(__file__).resolve().parents[2]
# AdamW's weights and two moments; a reference, or the policy beside the reward model; a reference and a reward model;
# a policy that is not trained.
COPIES = {"pretrain": 3, "warmup": 3, "policy": 4, "reward_model": 4, "ppo": 5, "drafters": 1}
PHASES = (Pretrain, Warmup, GroupPolicy, RewardModel, PPO, Distill)
SMALL = 0.3  # of a copy: exits, heads and their moments


def config(folder: Path, name: str, *overrides: str):
    sections = ("pretrain", "finetune.warmup", "finetune.policy", "align.reward_model", "align.ppo")
    options = [f"{section}.optimizer.name=adamw" for section in sections]
    options += ["checkpoint.every_seconds=null", "run.trackers=[]", "run.export=false", "device.compilation_cache="]
    options += ["stages=[pretrain, finetune, align, distill]", "budget.total=24"]
    places = [f"run.output_dir={folder}/runs", f"run.name={name}", f"data.cache_dir={folder}/data"]
    return load_config(ROOT / "configs/tiny.yaml", [*places, *options, *overrides])


class Watch:
    """What was in memory, in copies of the model beyond what was there when the run began: at each step of each phase,
    and when a checkpoint was about to be restored."""

    def __init__(self) -> None:
        self.steps: dict[str, list[float]] = {}
        self.restores: list[float] = []
        self.whole, self.before = 1, 0.0

    def begin(self, shape) -> None:
        gc.collect()  # and then no more: what is only freed in time is there
        self.whole, self.before = parameters(shape), 0.0
        self.before = self.copies()

    def copies(self) -> float:
        # A shard of an array is an array of the same memory.
        sizes = {a.unsafe_buffer_pointer(): a.size for a in jax.live_arrays() if a.dtype == np.float32}
        return sum(sizes.values()) / self.whole - self.before


@contextmanager
def watched(stop_in: str | None = None, skipped: tuple[int, ...] = ()) -> Iterator[Watch]:
    """Phases that look at the memory and compute nothing. Phase `stop_in` is told to stop in its first step; steps of
    these numbers, from 0, are said to be skipped."""
    watch, begin, restore = Watch(), Run.begin, Store.restore

    def step(phase: Phase, state: PhaseState, step):
        phase.run.store.wait()  # until then it holds what it saves
        watch.steps.setdefault(phase.name, []).append(watch.copies())
        if phase.name == stop_in and step.index == 0:
            phase.run.asked_to_stop = 15
        metrics = {"train/loss": 1.0, "train/grad_norm": 1.0, "train/skipped": float(step.index in skipped)}
        return state, metrics, 1

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Run, "begin", lambda run, shape: (watch.begin(shape), begin(run, shape))[1])
        patch.setattr(Store, "restore", lambda *given: (watch.restores.append(watch.copies()), restore(*given))[1])
        patch.setattr(insight, "peak_flops", lambda dtype: (1.0, "one"))
        patch.setattr(RewardModel, "prepare", lambda self, state: state)
        for kind in PHASES:
            patch.setattr(kind, "step", step)
            patch.setattr(kind, "evaluate", lambda self, state, when: (state, {}))
        gc.disable()
        try:
            yield watch
        finally:
            gc.enable()


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("residents")


def assert_copies(steps: dict[str, list[float]], phases: list[str]) -> None:
    assert list(steps) == phases
    for name, found in steps.items():
        assert all(COPIES[name] <= copies <= COPIES[name] + SMALL for copies in found), (name, found)


def test_each_phase_holds_one_copy_of_what_it_needs(folder):
    with watched() as watch:
        result = run_all(config(folder, "whole"))
    assert_copies(watch.steps, list(COPIES))
    first = initial_models(config(folder, "whole"), result.models.policy.shape, tiny.mesh())
    for path, array in flatten(result.models.policy).items():  # nothing was trained
        np.testing.assert_array_equal(array, flatten(first.policy)[path], err_msg=path)


@pytest.mark.parametrize("phase", ["warmup", "reward_model", "ppo"])
def test_a_phase_that_goes_on_holds_as_many_and_begins_with_none(folder, phase):
    """And all phases after it have the models of before."""
    with watched(stop_in=phase), pytest.raises(Interrupted):
        run_all(config(folder, phase))
    with watched() as watch:
        result = run_all(config(folder, phase))
    assert_copies(watch.steps, [*COPIES][[*COPIES].index(phase) :])
    (restored,) = watch.restores
    assert restored < SMALL
    first = initial_models(config(folder, phase), result.models.policy.shape, tiny.mesh())
    for path, array in flatten(result.models.policy).items():
        np.testing.assert_array_equal(array, flatten(first.policy)[path], err_msg=path)


def test_a_phase_that_goes_back_makes_room_first(folder):
    options = ["stages=[pretrain]", "budget.total=8", "faults.rollback_after=2", "checkpoint.every_steps=1"]
    with watched(skipped=(3, 4)) as watch:
        run_all(config(folder, "back", *options))
    (restored,) = watch.restores
    assert restored < SMALL
    assert_copies(watch.steps, ["pretrain"])


@pytest.mark.parametrize("kind", PHASES)
def test_what_is_restored_to_has_the_shapes_of_a_fresh_state(folder, kind):
    """Types and shardings too."""
    found = {}
    with watched(), pytest.MonkeyPatch.context() as patch:
        init = kind.init

        def compared(phase, models):
            state = init(phase, models)
            found["fresh"], found["shapes"] = flatten(state.arrays), flatten(phase.shapes())
            return state

        patch.setattr(kind, "init", compared)
        run_all(config(folder, f"shapes{kind.__name__}", f"stages=[{kind.stage}]", "budget.total=3"))
    described = [
        {path: (a.shape, a.dtype, a.sharding) for path, a in arrays.items()}
        for arrays in (found["fresh"], found["shapes"])
    ]
    assert described[0] == described[1]


@pytest.mark.parametrize(
    ("stages", "frozen", "kept"),
    [("[pretrain]", 0, 4), ("[pretrain, finetune]", 1, 4), ("[finetune, align]", 2, 4), ("[distill]", 1, 0)],
)
def test_the_plan_counts_as_many_copies(folder, stages, frozen, kept):
    """And one of gradients, beside the weights and the two moments."""
    shape = tiny.SHAPE
    planned = memory(config(folder, "plan", f"stages={stages}"), shape, tiny.mesh(), np.dtype("float32"))
    whole = sum(4 * array.size for array in flatten(abstract_models(shape, tiny.mesh(), False).policy).values())
    assert planned["weights, gradients and optimiser"] == kept * whole
    assert planned["frozen models"] == frozen * whole
    assert planned["decode view"] == whole + 4 * shape.vocab * shape.width  # the head of a tied model is its own there


def test_the_plan_counts_what_eagle_keeps(folder):
    """Weights, gradients and two moments, the view's weights, and of each slot its cache and the target's states."""
    eagle = ["speculation.drafter=eagle", "speculation.optimizer.name=adamw"]
    shape, float32, settings = tiny.SHAPE, np.dtype("float32"), config(folder, "plan", *eagle)
    tasks = settings.data.tasks
    length = tasks.max_prompt_tokens + tasks.max_completion_tokens
    own = {"eagle": replace(shape, layers=1)}
    slots = jax.eval_shape(lambda: empty_slots(shape, settings.speculation.slots, length, 1, Rules(), float32, own))
    kept = sum(array.size for array in jax.tree.leaves((slots.states_BTE, slots.draft_caches["eagle"].layers)))
    weights = sum(array.size for array in jax.tree.leaves(abstract_models(shape, tiny.mesh(), True).eagle))
    assert memory(settings, shape, tiny.mesh(), float32)["eagle"] == 4 * (kept + 5 * weights)


@pytest.mark.parametrize(("stages", "copies"), [("[pretrain]", 1), ("[pretrain, distill]", 4)])
def test_the_plan_counts_what_a_draft_model_keeps(folder, stages, copies):
    """Weights, where it is trained gradients and two moments, the view's weights with a head, each slot's cache."""
    options = ["speculation.drafter=draft_model", "speculation.optimizer.name=adamw", f"stages={stages}"]
    settings, draft, mesh = config(folder, "plan", *options), tiny.draft_shape(), tiny.mesh()
    tasks = settings.data.tasks
    length = tasks.max_prompt_tokens + tasks.max_completion_tokens
    cache = jax.eval_shape(lambda: empty_cache(draft, settings.speculation.slots, length, jnp.float32))
    weights = sum(a.size for a in jax.tree.leaves(abstract_models(tiny.SHAPE, mesh, False, draft).draft_model))
    viewed = weights + draft.vocab * draft.width
    expected = 4 * (copies * weights + viewed + sum(a.size for a in jax.tree.leaves(cache)))
    assert memory(settings, tiny.SHAPE, mesh, np.dtype("float32"), draft)["draft model"] == expected
