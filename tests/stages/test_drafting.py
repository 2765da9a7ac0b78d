"""The drafters in a run: trained, chosen among, kept in checkpoints and exports, and gone on with."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from support import tiny

from tlt_jax.checkpoint.store import Store
from tlt_jax.config import ConfigError, load_config
from tlt_jax.data import PackedRows
from tlt_jax.models.declare import flatten
from tlt_jax.stages.distill import text_prompts
from tlt_jax.stages.models import initial_models, model_shape, saved_models, with_drafters
from tlt_jax.stages.pipeline import run_all
from tlt_jax.stages.training import distill_training, group_policy_training, ppo_training

ROOT = Path(__file__).resolve().parents[2]
AUTO = [
    "speculation.drafter=auto",
    "speculation.auto_drafters=[eagle]",
    "speculation.auto_draft_lengths=[2]",
    "speculation.eagle_drafts=1",
]

DRAFT = ["speculation.drafter=draft_model", "speculation.draft_model.width=16", "speculation.draft_model.hidden=24"]


def config(folder: Path, *overrides: str):
    places = [f"run.output_dir={folder}/runs", f"data.cache_dir={folder}/data", "run.trackers=[]"]
    return load_config(ROOT / "configs/tiny.yaml", [*places, "device.compilation_cache=", *overrides])


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory):
    """(a folder in which pretraining ran with an automatic drafter, its result)."""
    folder = tmp_path_factory.mktemp("auto")
    return folder, run_all(config(folder, *AUTO, "stages=[pretrain]", "budget.total=3"))


def arrays(module) -> dict[str, bytes]:
    return {path: np.asarray(array).tobytes() for path, array in flatten(module).items()}


def learned(folder: Path) -> dict:
    """What the newest checkpoint holds of the controller."""
    with Store(folder / "runs/tiny/checkpoints", read_only=True) as store:
        return store.document(store.newest())["controller"]


def test_the_eagle_is_trained_and_measured(pretrained):
    folder, result = pretrained
    fresh = initial_models(config(folder, *AUTO), result.models.policy.shape, tiny.mesh()).eagle
    assert all(a != b for a, b in zip(arrays(fresh).values(), arrays(result.models.eagle).values(), strict=True))
    rows = [json.loads(line) for line in (folder / "runs/tiny/metrics.jsonl").read_text().splitlines()]
    assert all(np.isfinite(row["train/eagle_loss"]) and 0 < row["train/eagle_acceptance"] < 1 for row in rows)


def test_choices_are_in_the_record_and_the_report(pretrained):
    folder, result = pretrained
    table = result.phases[0]["drafting"]
    assert {(row["drafter"], row["draft_length"]) for row in table} == {("off", 0), ("eagle", 2)}
    assert sum(row["share"] for row in table) == pytest.approx(1.0)
    after = result.phases[0]["after"]
    assert 0.0 <= after["rollout/draft_length"] <= 2.0
    page = (folder / "runs/tiny/report.html").read_text()
    assert '<h2 id="drafting">' in page and "<td>eagle</td>" in page


def test_checkpoint_and_export_hold_the_eagle_and_the_checkpoint_the_controller(pretrained):
    folder, result = pretrained
    expected = arrays(result.models.eagle)
    assert arrays(saved_models(folder / "runs/tiny", tiny.mesh()).eagle) == expected
    for source in ("runs/tiny/export", "runs/tiny"):
        again = config(folder, *AUTO, f"model.init_from={folder}/{source}")
        shape = model_shape(again.model, result.models.policy.shape.vocab)
        assert arrays(initial_models(again, shape, tiny.mesh()).eagle) == expected
        assert initial_models(config(folder, f"model.init_from={folder}/{source}"), shape, tiny.mesh()).eagle is None
    assert learned(folder)["name"] == "CostTable" and learned(folder)["seen"]["blocks"] > 0


def test_distillation_goes_on_in_the_same_run_directory(pretrained):
    """With the drafters that pretraining left, and with what the controller learned; the policy stays as it is."""
    folder, before = pretrained
    blocks = learned(folder)["seen"]["blocks"]
    options = ["stages=[distill]", "budget.total=2", "distill.prompts=8", "distill.minibatches=2", "run.export=false"]
    after = run_all(config(folder, *AUTO, *options))
    rows = [json.loads(line) for line in (folder / "runs/tiny/metrics.jsonl").read_text().splitlines()]
    assert [row["phase"] for row in rows] == ["pretrain"] * 3 + ["drafters"] * 2
    with pytest.raises(ConfigError, match="already past 'pretrain'"):
        run_all(config(folder, *AUTO, "stages=[pretrain]", "budget.total=3"))
    assert arrays(after.models.policy) == arrays(before.models.policy)
    assert arrays(after.models.eagle) != arrays(before.models.eagle)
    assert arrays(after.models.exit) == arrays(before.models.exit)  # nobody drafts with it
    assert all(0 <= row["rollout/logprob_abs_diff_max"] < 1e-4 for row in rows if row["phase"] == "drafters")
    found = learned(folder)["seen"]
    assert found["blocks"] > blocks
    assert sum(key["chosen"] for key in found["keys"]) > found["blocks"]  # rounds, those of pretraining among them


@pytest.fixture(scope="module")
def distilled(pretrained, tmp_path_factory):
    """(a folder in which a draft model was distilled from the pretrained policy, the result)."""
    source, folder = pretrained[0] / "runs/tiny", tmp_path_factory.mktemp("draft_model")
    options = [f"model.init_from={source}", "stages=[distill]", "budget.total=2", "distill.prompts=8"]
    return folder, run_all(config(folder, *DRAFT, *options))


def test_a_draft_model_is_distilled_from_the_policy(pretrained, distilled):
    folder, result = distilled
    assert arrays(result.models.policy) == arrays(pretrained[1].models.policy)
    fresh = initial_models(config(folder, *DRAFT), result.models.policy.shape, tiny.mesh()).draft_model
    trained = arrays(result.models.draft_model)
    assert all(a != b for a, b in zip(arrays(fresh).values(), trained.values(), strict=True))
    rows = [json.loads(line) for line in (folder / "runs/tiny/metrics.jsonl").read_text().splitlines()]
    assert len(rows) == 2
    for row in rows:
        assert np.isfinite(row["train/draft_model_loss"]) and 0 < row["train/draft_model_acceptance"] < 1
        assert 0 <= row["rollout/logprob_abs_diff_max"] < 1e-4
    (phase,) = result.phases
    assert phase["after"]["rollout/draft_length"] > 0


def test_checkpoint_and_export_hold_the_draft_model(distilled):
    folder, result = distilled
    expected, vocab = arrays(result.models.draft_model), result.models.policy.shape.vocab
    run, export = folder / "runs/tiny", folder / "runs/tiny/export"
    assert arrays(saved_models(run, tiny.mesh()).draft_model) == expected
    for options in (
        [f"model.init_from={run}"],
        [f"model.init_from={export}"],
        [f"model.init_from={export}", f"speculation.draft_model.init_from={export}/draft_model"],
        [f"speculation.draft_model.init_from={export}/draft_model"],
    ):
        again = config(folder, *DRAFT, *options)
        shape = model_shape(again.model, vocab)
        assert arrays(initial_models(again, shape, tiny.mesh()).draft_model) == expected
    without = config(folder, f"model.init_from={run}")
    assert initial_models(without, shape, tiny.mesh()).draft_model is None


def test_a_draft_model_that_does_not_fit_is_refused(distilled):
    folder, result = distilled
    draft = f"speculation.draft_model.init_from={folder}/runs/tiny/export/draft_model"
    other = replace(result.models.policy.shape, vocab=700)
    with pytest.raises(ConfigError, match=r"`speculation.draft_model` has a vocabulary of 512; expected .* 700"):
        initial_models(config(folder, *DRAFT, draft), other, tiny.mesh())
    with pytest.raises(ConfigError, match=r"`speculation.draft_model` asks for .*layers=1.*; expected .*layers=2"):
        with_drafters(config(folder, *DRAFT, "speculation.draft_model.layers=1"), result.models, tiny.mesh())


def test_a_stage_trains_the_drafters_that_the_config_says(tmp_path):
    shape = tiny.SHAPE
    trained = {
        training.__name__: set(training(config(tmp_path, *options), shape, tiny.mesh()).roles)
        for training, options in [
            (group_policy_training, [*AUTO, "speculation.eagle_stages=[pretrain]"]),
            (ppo_training, AUTO),
            (distill_training, ["speculation.drafter=auto"]),
        ]
    }
    only = distill_training(config(tmp_path, *DRAFT), shape, tiny.mesh())
    assert set(only.roles) == {"draft_model"}
    assert trained == {
        "group_policy_training": {"policy", "exit"},
        "ppo_training": {"policy", "exit", "eagle", "value"},
        "distill_training": {"exit", "eagle"},
    }


def test_text_to_write_on_from_is_the_beginning_of_rows_of_one_document(tmp_path):
    rows = PackedRows(
        tokens=np.arange(24).reshape(3, 8),
        targets=np.zeros((3, 8)),
        weights=np.ones((3, 8)),
        segments=np.array([[1, 1, 1, 1, 2, 2, 2, 2], [1, 1, 1, 2, 2, 2, 2, 2], [1, 1, 1, 1, 1, 0, 0, 0]]),
        positions=np.zeros((3, 8)),
    )
    limited = ["data.context_length=8", "data.tasks.max_prompt_tokens=4", "data.tasks.max_completion_tokens=4"]
    run = SimpleNamespace(corpus=SimpleNamespace(train=rows), config=config(tmp_path, *limited))
    assert [prompt.tolist() for prompt in text_prompts(run)] == [[0, 1, 2, 3], [16, 17, 18, 19]]
    run.config = config(tmp_path, *limited, "data.tasks.max_prompt_tokens=6", "data.tasks.max_completion_tokens=2")
    with pytest.raises(ConfigError, match="begins with 6 tokens of one document"):
        text_prompts(run)
