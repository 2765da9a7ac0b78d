"""Log-probs of rollouts that are exactly the update's own."""

import json
from pathlib import Path

from tlt_jax.config import load_config
from tlt_jax.stages.pipeline import run_all

ROOT = Path(__file__).resolve().parents[2]


def test_the_ratio_begins_at_exactly_one(tmp_path):
    """In both stages, over packed minibatches of several microbatches. What decoding recorded is near, not the same."""
    options = [
        "stages=[finetune, align]",
        "budget.total=16",
        "finetune.policy.accumulation=2",
        "finetune.policy.minibatches=2",
        "finetune.policy.epochs=2",
        "rollout.exact_logprobs=true",
        f"run.output_dir={tmp_path}/runs",
        f"data.cache_dir={tmp_path}/data",
        "run.trackers=[]",
        "run.export=false",
    ]
    run_all(load_config(ROOT / "configs/tiny.yaml", [*options, "device.compilation_cache="]))
    rows = [json.loads(line) for line in (tmp_path / "runs/tiny/metrics.jsonl").read_text().splitlines()]
    updated = [row for row in rows if row["phase"] in ("policy", "ppo")]
    assert {row["phase"] for row in updated} == {"policy", "ppo"}
    assert all(row["rollout/logprob_abs_diff_max"] == 0.0 and row["rollout/logprob_kl"] == 0.0 for row in updated)
    assert all(row["train/skipped"] == 0.0 for row in updated)
    decoded = [row["rollout/decoded_logprob_abs_diff_max"] for row in updated]
    assert 0.0 < max(decoded) < 1e-4
