"""What a run will do, before it does it."""

from rich.table import Table

from tlt_jax.config import Config
from tlt_jax.models.declare import shardings
from tlt_jax.observe.logs import CONSOLE
from tlt_jax.parallel.mesh import MESH_AXES, make_mesh, mesh_shape
from tlt_jax.stages.budget import Spent, phase_budget, spent
from tlt_jax.stages.facts import verification_in_words
from tlt_jax.stages.memory import in_words, memory, parameters
from tlt_jax.stages.models import draft_shape, model_shape, tokenizer_path, transformer
from tlt_jax.stages.run import check_batches
from tlt_jax.text import load_tokenizer


def print_plan(config: Config) -> None:
    """Prints stages with their budgets, the model, the mesh and the memory of its arrays. Touches no device but to
    count them."""
    import jax

    from tlt_jax.parallel.mesh import compute_dtype, set_up_devices

    set_up_devices(config.device)
    path = config.data.tokenizer.path or tokenizer_path(config.model)
    vocab = load_tokenizer(path).vocab_size if path else config.data.tokenizer.vocab_size
    shape = model_shape(config.model, vocab)
    draft = draft_shape(config, shape)
    mesh = mesh_shape(config.device.mesh, jax.device_count())
    check_batches(config, mesh[0] * mesh[1])
    whole = make_mesh(config.device.mesh)
    for each in (shape, *([draft] if draft else [])):
        shardings(transformer(each), whole)  # refuses a mesh that does not divide the model
    facts = Table(title=f"plan of {config.run.name}", show_header=False, title_justify="left")
    rows = {
        "devices": f"{jax.device_count()} x {jax.devices()[0].device_kind}, mesh "
        + " x ".join(f"{a} {n}" for a, n in zip(MESH_AXES, mesh, strict=True)),
        "model": f"{parameters(shape):,} parameters: {shape.layers} layers, {shape.width} wide, "
        f"{shape.heads} heads ({shape.kv_heads} kv), vocabulary {shape.vocab}",
        "drafter": f"{config.speculation.drafter}, {config.speculation.draft_length} tokens; "
        f"exit after layer {shape.exit_layer}; verification: {verification_in_words(config.speculation)}",
        "memory": in_words(memory(config, shape, whole, compute_dtype(config.device), draft)),
        "run directory": f"{config.run.output_dir}/{config.run.name}",
    }
    if draft:
        rows["draft model"] = f"{parameters(draft):,} parameters: {draft.layers} layers, {draft.width} wide"
    for name, value in rows.items():
        facts.add_row(name, value)
    CONSOLE.print(facts)
    CONSOLE.print(_stages(config))


def _stages(config: Config) -> Table:
    unit = config.budget.unit
    rows = Table("stage", "phase", f"budget, {unit}", "tokens a step", "tokens")
    for stage in config.stages:
        before: list[Spent] = []
        for phase, end, tokens in _phases(config)[stage]:
            amount = phase_budget(config, stage, end, before).amount
            before.append(spent(unit, amount))
            total = {"steps": f"{amount * tokens:,.0f}", "tokens": f"{amount:,.0f}", "seconds": "as time allows"}[unit]
            rows.add_row(stage, phase, f"{amount:,.0f}", f"{tokens:,}", total)
    return rows


def _phases(config: Config) -> dict[str, list[tuple[str, float, int]]]:
    """(phase, share of its stage at which it ends, most tokens a step) by stage."""
    row, limits = config.data.context_length, config.data.tasks
    whole = limits.max_prompt_tokens + limits.max_completion_tokens
    warmup, policy, reward, ppo = (
        config.finetune.warmup,
        config.finetune.policy,
        config.align.reward_model,
        config.align.ppo,
    )
    completions = policy.prompts * policy.group_size
    return {
        "pretrain": [("pretrain", 1.0, config.pretrain.batch_size * row)],
        "finetune": [
            ("warmup", warmup.share, warmup.batch_size * row),
            ("policy", 1.0, completions * limits.max_completion_tokens),
        ],
        "align": [
            ("reward_model", reward.share, 2 * reward.batch_size * whole),
            ("ppo", 1.0, ppo.prompts * limits.max_completion_tokens),
        ],
        "distill": [("drafters", 1.0, config.distill.prompts * limits.max_completion_tokens)],
    }
