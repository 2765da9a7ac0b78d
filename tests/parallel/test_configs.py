"""The configs for accelerators: their training and decoding steps compiled ahead of time, from shapes alone."""

import importlib.util
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "tests" / "support" / "ahead_of_time.py"
# Devices, and bytes of memory of each.
MACHINES = {"a100_4": (4, 80e9), "a100_8x8": (64, 80e9), "tpu_v5p_32": (16, 95e9)}
# Where arrays lie, by hand: the local shapes of a device.
LOCAL = {
    "a100_4": {  # a quarter over tensor: vocabulary, heads, hidden units
        "embedding": [8192, 4096],
        "head": [4096, 8192],
        "final_norm": [4096],
        "layers/attention/query": [32, 4096, 8, 128],
        "layers/attention/key": [32, 4096, 2, 128],
        "layers/attention/out": [32, 8, 128, 4096],
        "layers/mlp/gate": [32, 4096, 3584],
        "layers/mlp/down": [32, 3584, 4096],
        "cache": [64, 2, 2048, 128],
    },
    "a100_8x8": {  # an eighth over fsdp: the width; the cache over all 64
        "embedding": [32768, 512],
        "head": [512, 32768],
        "final_norm": [512],
        "layers/attention/query": [32, 512, 32, 128],
        "layers/attention/key": [32, 512, 8, 128],
        "layers/attention/out": [32, 32, 128, 512],
        "layers/mlp/gate": [32, 512, 14336],
        "layers/mlp/down": [32, 14336, 512],
        "cache": [8, 8, 2048, 128],
    },
    "tpu_v5p_32": {  # a sixteenth over fsdp
        "embedding": [32768, 256],
        "head": [256, 32768],
        "final_norm": [256],
        "layers/attention/query": [32, 256, 32, 128],
        "layers/attention/key": [32, 256, 8, 128],
        "layers/attention/out": [32, 32, 128, 256],
        "layers/mlp/gate": [32, 256, 14336],
        "layers/mlp/down": [32, 14336, 256],
        "cache": [16, 8, 2048, 128],
    },
}


def compiled(name: str, folder: Path, *topology: str) -> dict:
    out = folder / "compiled.json"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests"), *sys.path])}
    command = [sys.executable, SCRIPT, ROOT / "configs" / f"{name}.yaml", MACHINES[name][0], out, *topology]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, env=environment, timeout=1800)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(out.read_text())


def check(name: str, found: dict) -> None:
    """Arrays lie as LOCAL says, and all of it fits a device."""
    for program in ("pretrain", "policy"):
        arrays = found[program]["arrays"]
        for path, shape in LOCAL[name].items():
            of_path = {owner: local for owner, local in arrays.items() if owner.endswith(f"/{path}")}
            of_policy = {owner: local for owner, local in of_path.items() if "/exit/" not in owner}
            assert {tuple(local) for local in of_policy.values()} == ({tuple(shape)} if path != "cache" else set())
            assert path == "cache" or len(of_policy) == 3, of_policy  # the weights, and AdamW's two moments
        state = 4 * sum(math.prod(shape) for shape in arrays.values())
        assert found[program]["aliased"] >= 0.999 * state  # donated: there is one copy of it
        # Weights and two moments, of what is planned for with gradients; the exit and its moments are small.
        assert state == pytest.approx(0.75 * found["planned"]["weights, gradients and optimiser"], rel=0.01)
    assert {tuple(shape) for shape in found["block"]["cache"]} == {tuple(LOCAL[name]["cache"])}
    assert len(found["block"]["cache"]) == 32

    planned, memory = found["planned"], MACHINES[name][1]
    # What is planned for is what the compiler's arguments take; the slots' own rows and the exit are small.
    view_and_cache = planned["decode view"] + planned["cache of all slots"]
    assert found["block"]["arguments"] == pytest.approx(view_and_cache, rel=0.01)
    for program in ("pretrain", "policy"):
        used = found[program]
        assert used["arguments"] + used["outputs"] - used["aliased"] + used["temporaries"] <= memory
    # Beside the step's own arrays there are the frozen models, the decode view and its cache; gradients are planned for
    # and among the temporaries.
    gradients = planned["weights, gradients and optimiser"] / 4
    assert sum(planned.values()) - gradients + found["policy"]["temporaries"] <= memory
    assert sum(planned.values()) + found["block"]["temporaries"] <= memory


@pytest.mark.parametrize("name", MACHINES)
def test_the_steps_compile_for_as_many_simulated_devices_and_fit_them(name, tmp_path):
    """A CPU computes bfloat16's products in float32, so that temporaries are larger here than there."""
    check(name, compiled(name, tmp_path))


@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="needs libtpu, TPU's compiler")
def test_the_steps_compile_for_the_tpu_itself(tmp_path, monkeypatch):
    monkeypatch.setenv("TPU_SKIP_MDS_QUERY", "1")
    check("tpu_v5p_32", compiled("tpu_v5p_32", tmp_path, "v5p:2x2x4"))
