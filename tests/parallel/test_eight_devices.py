"""Eight simulated devices against one: training, rollouts, where arrays lie, and what crosses between devices."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from support import tiny
from support.collectives import Collective

ROWS, LENGTH, DRAFTS = 8, 8, 3  # as in the program
SCRIPT = Path(__file__).parents[1] / "support" / "eight_devices.py"


@pytest.fixture(scope="module")
def eight(tmp_path_factory):
    """{mesh: what eight simulated devices computed on it}, and the same on one device under "1x1x1"."""
    out = tmp_path_factory.mktemp("eight") / "results.json"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(SCRIPT.parents[2]), str(SCRIPT.parents[1])])}
    done = subprocess.run(
        [sys.executable, str(SCRIPT), str(out)], capture_output=True, text=True, env=environment, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(out.read_text())


MESHES = ["8x1x1", "2x2x2", "1x4x2"]


@pytest.mark.parametrize("mesh", MESHES)
def test_training_on_eight_devices_gives_the_losses_and_parameters_of_one(eight, mesh):
    one = eight["1x1x1"]
    assert len(one["losses"]) == 20
    assert one["losses"][-1] < one["losses"][0] - 0.5
    np.testing.assert_allclose(eight[mesh]["losses"], one["losses"], atol=1e-5)
    np.testing.assert_allclose(eight[mesh]["final"], one["final"], atol=1e-5)


@pytest.mark.parametrize("mesh", MESHES)
def test_parameters_and_moments_lie_where_the_rules_say_before_and_after_training(eight, mesh):
    """Every array whose sharding differs from the table in the script would be named here."""
    assert eight[mesh]["misplaced_before"] == []
    assert eight[mesh]["misplaced_after"] == []
    assert eight[mesh]["checked"] == eight["1x1x1"]["checked"] > 14 + 21  # parameters and moments, and some counts


@pytest.mark.parametrize("mesh", MESHES)
def test_an_update_is_compiled_once(eight, mesh):
    assert eight[mesh]["compiled_after_the_first_step"] == 0


@pytest.mark.parametrize("mesh", MESHES)
def test_initialisation_does_not_depend_on_the_mesh(eight, mesh):
    assert eight[mesh]["initial"] == eight["1x1x1"]["initial"]


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("temperature", ["0.0", "1.0"])
def test_rollouts_on_eight_devices_give_the_tokens_of_one(eight, mesh, temperature):
    assert eight[mesh]["tokens"][temperature] == eight["1x1x1"]["tokens"][temperature]
    assert eight[mesh]["counts"] == eight["1x1x1"]["counts"]


def test_the_simulated_devices_are_not_this_processes():
    assert jax.device_count() == 1


# What an update and a block of decoding send between devices, counted by hand. In float32, 4 bytes a number; a scan
# over layers stands once in the program, and there are two: up to the exit, and after it.
S = tiny.SHAPE
MATRICES = S.width * S.head_dim * 2 * (S.heads + S.kv_heads) + 3 * S.width * S.hidden
NORMS = 2 * S.width
TABLE = S.vocab * S.width


def sizes(mesh: str) -> tuple[int, int, int]:
    data, fsdp, tensor = map(int, mesh.split("x"))
    return data, fsdp, tensor


def found(eight, mesh: str, program: str, *, kind: str | None = None, inside: str = "") -> list[Collective]:
    """Without the optimiser's: Muon's products are its own matter."""
    rows = [Collective(*row) for row in eight[mesh][program]]
    return [row for row in rows if inside in row.name and kind in (None, row.kind) and "optimizer" not in row.name]


def count_and_bytes(rows: list[Collective]) -> tuple[int, int]:
    return len(rows), sum(row.size for row in rows)


@pytest.mark.parametrize("mesh", MESHES)
def test_weights_are_put_together_and_gradients_added_up_and_nothing_else_crosses(eight, mesh):
    """Nothing is dealt out anew between devices (all-to-all, permutes), nor on one device alone. Gradients are added up
    by all-reduces: only GPU's and TPU's compilers make reduce-scatters of them."""
    kinds = {row.kind for row in found(eight, mesh, "update")}
    assert kinds == ({"all-reduce"} if sizes(mesh)[1] == 1 else {"all-reduce", "all-gather"})
    assert found(eight, "1x1x1", "update") == []


@pytest.mark.parametrize("mesh", MESHES)
def test_a_layers_weights_are_put_together_once_forward_and_once_backward(eight, mesh):
    _, fsdp, tensor = sizes(mesh)
    gathers = found(eight, mesh, "update", kind="all-gather", inside="while/body")
    backward = [row for row in gathers if "transpose" in row.name]
    forward = [row for row in gathers if row not in backward]
    expected = (2 * 9, 2 * 4 * (MATRICES // tensor + NORMS)) if fsdp > 1 else (0, 0)
    assert count_and_bytes(forward) == expected
    assert count_and_bytes(backward) == expected


@pytest.mark.parametrize("mesh", MESHES)
def test_a_layer_adds_up_its_two_outputs_over_tensor_and_nothing_else_forward(eight, mesh):
    data, fsdp, tensor = sizes(mesh)
    reduces = found(eight, mesh, "update", kind="all-reduce", inside="while/body")
    forward = [row for row in reduces if "transpose" not in row.name]
    activations = 4 * ROWS // (data * fsdp) * LENGTH * S.width
    assert count_and_bytes(forward) == ((2 * 2, 2 * 2 * activations) if tensor > 1 else (0, 0))


@pytest.mark.parametrize("mesh", MESHES)
def test_the_table_is_put_together_for_each_of_its_uses(eight, mesh):
    """For looking up, and for the model's and the exit's logits, forward and backward: five times at most."""
    _, fsdp, tensor = sizes(mesh)
    outside = [row for row in found(eight, mesh, "update", kind="all-gather") if "while/body" not in row.name]
    tables = [row for row in outside if row.size == 4 * TABLE // tensor]
    assert (3 <= len(tables) <= 5) if fsdp > 1 else not tables
    small = 4 * (2 * S.width * S.exit_rank + 8 * S.width)  # the exit, and norms
    assert sum(row.size for row in outside if row not in tables) <= small


@pytest.mark.parametrize("mesh", MESHES)
def test_gradients_are_added_up_once_over_the_batchs_devices(eight, mesh):
    """All the gradients, that of the table once for each use of it, and what tensor adds up, forward or backward."""
    data, fsdp, tensor = sizes(mesh)
    gradients = 2 * (MATRICES + NORMS) + 3 * TABLE + 2 * S.width * S.exit_rank + 2 * S.width
    rows = ROWS // (data * fsdp) * LENGTH
    activations = (2 * 2 * 3 + 2 + 4) * rows * S.width if tensor > 1 else 0
    small = 64 + 2 * rows  # losses, norms of gradients
    sent = sum(row.size for row in found(eight, mesh, "update", kind="all-reduce"))
    assert sent <= 4 * (gradients + activations + small)


@pytest.mark.parametrize("mesh", [*MESHES, "1x1x1"])
def test_a_block_of_decoding_sends_what_tensor_splits_and_whether_all_are_done(eight, mesh):
    """Rounds of drafts. A pass through layers adds up twice a layer; a draw has the vocabulary put together; tokens are
    looked up in a table that tensor splits. Slots are their device's own, and the exit lies whole on each."""
    data, fsdp, tensor = sizes(mesh)
    rows = 8 // (data * fsdp)
    early, late = S.exit_layer, S.layers - S.exit_layer
    activations, logits = 4 * rows * S.width, 4 * rows * S.vocab
    fed = DRAFTS + 1
    expected = {
        # What the block did, summed over its slots: sequences' calls, tokens, drafts offered and kept at each place.
        ("all-reduce", ""): [4 * (2 + 2 * DRAFTS)] if data * fsdp > 1 else [],
        ("all-reduce", "while/cond"): [4] if data * fsdp > 1 else [],
        ("all-reduce", "while/body"): [activations] * 2 * (1 + 2 * early) + [fed * activations] * 2 * late
        if tensor > 1
        else [],
        ("all-gather", "while/body"): [logits, fed * logits] if tensor > 1 else [],
    }
    block = found(eight, mesh, "block")
    inside = {place: sorted(sizes) for place, sizes in expected.items() if sizes}
    seen: dict[tuple[str, str], list[int]] = {}
    for row in block:
        place = next((word for word in ("while/cond", "while/body") if word in row.name), "")
        seen.setdefault((row.kind, place), []).append(row.size)
    assert {place: sorted(sizes) for place, sizes in seen.items()} == inside


@pytest.mark.parametrize("mesh", MESHES)
def test_the_decode_view_is_split_over_tensor_alone(eight, mesh):
    """Over fsdp it would have to be put together at each verification."""
    tensor = sizes(mesh)[2]
    shards = eight[mesh]["view"]
    whole = eight["1x1x1"]["view"]
    assert shards.keys() == whole.keys()
    for path, shape in whole.items():
        split = 1 if "norm" in path or path.startswith(("exit/", "cos_sin/")) else tensor
        assert math.prod(shards[path]) * split == math.prod(shape), path
