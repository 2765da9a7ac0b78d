"""Twenty training steps against a twin in PyTorch: transformers' Llama, torch.optim.AdamW, and an exit written anew.

The twin sees each update as one plain batch, with masks and positions spelt out; we accumulate over two microbatches.
"""

import jax.numpy as jnp
import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the extra `parity` (torch, transformers) is not installed")
transformers = pytest.importorskip("transformers", reason="the extra `parity` (torch, transformers) is not installed")

from tlt_jax.config.stage_sections import OptimizerConfig  # noqa: E402
from tlt_jax.data.packing import pack_documents  # noqa: E402
from tlt_jax.models.declare import flatten  # noqa: E402
from tlt_jax.models.heads import ShallowExit  # noqa: E402
from tlt_jax.models.hf import export, read_weights  # noqa: E402
from tlt_jax.models.transformer import ModelShape, Transformer  # noqa: E402
from tlt_jax.train.losses import next_token_objective  # noqa: E402
from tlt_jax.train.optimizers import learning_rate  # noqa: E402
from tlt_jax.train.state import Role, new_state  # noqa: E402
from tlt_jax.train.step import make_update  # noqa: E402

pytestmark = pytest.mark.torch

STEPS, ROWS, LENGTH, STRIDE, EXIT_WEIGHT = 20, 4, 24, 4, 0.3
POLICY = OptimizerConfig(learning_rate=1e-2, weight_decay=0.1, warmup_fraction=0.2)
EXIT = OptimizerConfig(learning_rate=1e-2, weight_decay=0.05, beta2=0.99, warmup_fraction=0.1, decay="linear")


class TwinExit(torch.nn.Module):
    """h -> norm(h + up(down(h / rms(h)))), before the head that the target lends."""

    def __init__(self, arrays, eps):
        super().__init__()
        self.down, self.up, self.norm = (torch.nn.Parameter(torch.tensor(arrays[n])) for n in ("down", "up", "norm"))
        self.eps = eps

    def forward(self, h):
        return self.rms(h + self.rms(h) @ self.down @ self.up) * self.norm

    def rms(self, h):
        return h / torch.sqrt((h * h).mean(-1, keepdim=True) + self.eps)


class TwinOptimizer:
    """AdamW on one role, with clipping at its own global norm; decay on matrices alone."""

    def __init__(self, module, config):
        self.config, self.parameters = config, list(module.parameters())
        groups = [
            {"params": [p for p in self.parameters if p.ndim >= 2], "weight_decay": config.weight_decay},
            {"params": [p for p in self.parameters if p.ndim < 2], "weight_decay": 0.0},
        ]
        self.adamw = torch.optim.AdamW(groups, lr=0.0, betas=(config.beta1, config.beta2), eps=1e-8)

    def step(self, progress):
        """Updates; returns the gradient's norm before clipping."""
        norm = torch.sqrt(sum((p.grad**2).sum() for p in self.parameters))
        for p in self.parameters:
            p.grad *= min(1.0, self.config.clip_norm / float(norm))
        for group in self.adamw.param_groups:
            group["lr"] = float(learning_rate(self.config, progress))
        self.adamw.step()
        self.adamw.zero_grad()
        return float(norm)


def twin_losses(model, exit, batch, step, exit_layer):
    """(main, early) of one plain batch [B, S]: means over the tokens of weight 1."""
    b = {name: torch.tensor(array) for name, array in batch.items()}
    same = b["segments"][:, None, :, None] == b["segments"][:, None, None, :]
    visible = same & torch.ones(LENGTH, LENGTH).tril().bool()
    mask = torch.zeros(visible.shape).masked_fill(~visible, torch.finfo(torch.float32).min)
    out = model(b["tokens"], attention_mask=mask, position_ids=b["positions"], output_hidden_states=True)
    looked_at = b["weights"] * (torch.arange(LENGTH) % STRIDE == step % STRIDE)
    early_logits = model.lm_head(exit(out.hidden_states[exit_layer]))

    def mean(logits, weights):
        losses = torch.nn.functional.cross_entropy(logits.transpose(1, 2), b["targets"].long(), reduction="none")
        return (losses * weights).sum() / weights.sum()

    return mean(out.logits, b["weights"]), mean(early_logits, looked_at)


def batches(vocab):
    """STEPS batches [ROWS, LENGTH] of packed documents of 3 to 15 tokens; the last row ends in padding."""
    rng = np.random.default_rng(0)
    for _ in range(STEPS):
        documents, total = [], 0
        while total < (ROWS - 1) * LENGTH + 4:
            # Runs of few tokens, so that there is something to learn.
            documents.append((rng.integers(vocab) + rng.integers(0, 4, int(rng.integers(3, 16)))) % vocab)
            total += len(documents[-1])
        rows = pack_documents(documents, LENGTH)
        yield {name: getattr(rows, name)[:ROWS] for name in ("tokens", "targets", "weights", "segments", "positions")}


# The norms at which gradients are clipped (policy, exit) lie amid those that occur: some steps are clipped, some not.
@pytest.mark.parametrize(
    ("shape", "clip_norms"),
    [
        (ModelShape(61, 32, 3, 4, 2, 8, 45, 1, 6, 10_000.0, 1e-5, True), (2.2, 0.05)),
        (ModelShape(61, 24, 2, 3, 1, 10, 40, 1, 5, 500.0, 1e-6, False), (8.0, 0.2)),
    ],
    ids=["tied", "untied"],
)
def test_twenty_steps_equal_the_twins(shape, clip_norms, tmp_path, random_arrays, as_module, mesh, record_property):
    arrays, exit_arrays = random_arrays(shape), random_arrays(shape, ShallowExit, 1)
    export(tmp_path / "m", shape, arrays, {}, None, LENGTH)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "m", attn_implementation="eager").train()
    exit = TwinExit(exit_arrays, shape.norm_eps)
    policy_config = POLICY.model_copy(update={"clip_norm": clip_norms[0]})
    exit_config = EXIT.model_copy(update={"clip_norm": clip_norms[1]})
    twins = {"policy": TwinOptimizer(model, policy_config), "exit": TwinOptimizer(exit, exit_config)}

    builds = {"policy": lambda d: Transformer(shape, d), "exit": lambda d: ShallowExit(shape, d)}
    roles = {"policy": Role(builds["policy"], policy_config), "exit": Role(builds["exit"], exit_config)}
    params = {"policy": as_module(shape, arrays), "exit": as_module(shape, exit_arrays, ShallowExit)}
    state = new_state(roles, params, mesh)
    objective = next_token_objective(dtype=jnp.float32, remat="none", exit_weight=EXIT_WEIGHT, exit_stride=STRIDE)
    update = make_update(objective, roles, mesh)

    differences, clipped, mains = [], {"policy": 0, "exit": 0}, []
    for step, batch in enumerate(batches(shape.vocab)):
        assert batch["segments"].max() > 1
        assert (batch["segments"] == 0).any()
        progress = step / STEPS
        main, early = twin_losses(model, exit, batch, step, shape.exit_layer)
        (main + EXIT_WEIGHT * early).backward()
        norms = {name: twin.step(progress) for name, twin in twins.items()}
        halves = {name: jnp.asarray(a.reshape(2, ROWS // 2, LENGTH)) for name, a in batch.items()}
        state, metrics = update(state, halves, jnp.float32(progress))
        expected = {"train/main_loss": main, "train/exit_loss": early, "train/loss": main + EXIT_WEIGHT * early}
        differences.append(max(abs(float(metrics[name]) - value.item()) for name, value in expected.items()))
        assert float(metrics["train/grad_norm"]) == pytest.approx(norms["policy"], rel=1e-3)
        for name, norm in norms.items():
            clipped[name] += norm > twins[name].config.clip_norm
        mains.append(main.item())

    record_property("largest difference", max(differences))
    print(f"largest difference of a loss {max(differences):.2e}; clipped {clipped}; {mains[0]:.3f} to {mains[-1]:.3f}")
    assert max(differences) < 1e-4
    assert mains[-1] < mains[0] - 0.3
    assert all(2 < count < STEPS - 2 for count in clipped.values())

    model.save_pretrained(tmp_path / "twin")
    trained = read_weights(tmp_path / "twin", shape)
    apart = {path: np.abs(trained[path] - np.asarray(a)).max() for path, a in flatten(state.params["policy"]).items()}
    print(f"largest difference of a weight {max(apart.values()):.2e}")
    assert max(apart.values()) < 1e-3, apart
    for name in ("down", "up", "norm"):
        found = np.asarray(flatten(state.params["exit"])[name])
        np.testing.assert_allclose(found, getattr(exit, name).detach().numpy(), atol=1e-3)
