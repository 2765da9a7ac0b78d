"""What the phases train, and to what end, from the config and the model's shape alone.

So an update step can be looked at, or compiled ahead of time, before there are data or weights.
"""

from dataclasses import dataclass
from typing import Any

import jax

from tlt_jax.config import Config
from tlt_jax.config.base import Stage
from tlt_jax.config.stage_sections import OptimizerConfig, PretrainConfig, WarmupConfig
from tlt_jax.models.transformer import ModelShape
from tlt_jax.parallel.programs import Program
from tlt_jax.rl.objectives import PolicyTerms, policy_objective, reward_objective
from tlt_jax.stages.models import Models, abstract_models, draft_shape, eagle, scalar_head, shallow_exit, transformer
from tlt_jax.train.distillation import DrafterTerms, distillation_objective
from tlt_jax.train.eagle_loss import Chains
from tlt_jax.train.losses import next_token_objective
from tlt_jax.train.precision import Precision, precision_of
from tlt_jax.train.state import Role, TrainState, abstract_state, new_state
from tlt_jax.train.step import Objective, make_update


@dataclass(frozen=True)
class Training:
    """A phase's training: what it trains, and to what end."""

    roles: dict[str, Role]
    objective: Objective
    shape: ModelShape
    mesh: jax.sharding.Mesh
    precision: Precision
    spike_factor: float
    with_eagle: bool
    draft_shape: ModelShape | None

    def update(self) -> Program:
        """The update step; it compiles when it is first called, or lowered."""
        return make_update(self.objective, self.roles, self.mesh, self.spike_factor, self.precision)

    def new_state(self, params: dict[str, Any]) -> TrainState:
        """A state at step 0 with the given parameters by role (copied) and fresh optimisers."""
        return new_state(self.roles, params, self.mesh, self.precision)

    def abstract_state(self) -> TrainState:
        """The state's shapes and shardings."""
        return abstract_state(self.roles, self.mesh, self.precision)

    def abstract_models(self) -> Models:
        """The shapes and shardings of the policy and its drafters."""
        return abstract_models(self.shape, self.mesh, self.with_eagle, self.draft_shape)


def supervised_training(
    config: Config, section: PretrainConfig | WarmupConfig, shape: ModelShape, mesh: jax.sharding.Mesh
) -> Training:
    """Next-token training of the policy, of the drafter's exit if it has a loss, and of an eagle."""
    precision = precision_of(config.device)
    stage: Stage = "pretrain" if isinstance(section, PretrainConfig) else "finetune"
    terms = drafter_terms(config, stage, section.exit_weight)
    objective = next_token_objective(
        dtype=precision.dtype,
        remat=config.model.remat,
        exit_weight=section.exit_weight,
        exit_stride=config.speculation.exit_stride,
        loss_chunk=config.model.loss_chunk,
        chains=terms.chains,
    )
    roles = _policy_roles(config, shape, section.optimizer, terms)
    return _training(config, roles, objective, shape, mesh)


def group_policy_training(config: Config, shape: ModelShape, mesh: jax.sharding.Mesh) -> Training:
    """Group-relative policy optimisation."""
    policy = config.finetune.policy
    terms = PolicyTerms(
        clip_low=policy.clip_low,
        clip_high=policy.clip_high,
        drafters=drafter_terms(config, "finetune", policy.exit_weight),
        entropy_coef=policy.entropy_coef,
        kl_coef=policy.kl_coef,
        kl_estimator=policy.kl_estimator,
        with_logp=config.rollout.exact_logprobs,
    )
    roles = _policy_roles(config, shape, policy.optimizer, terms.drafters)
    return _training(config, roles, _policy_objective(config, terms), shape, mesh)


def reward_training(config: Config, shape: ModelShape, mesh: jax.sharding.Mesh) -> Training:
    """The reward model: a transformer and a scalar head."""
    optimizer = config.align.reward_model.optimizer
    roles = {
        "reward_trunk": Role(transformer(shape), optimizer),
        "reward": Role(scalar_head(shape), optimizer),
    }
    objective = reward_objective(dtype=precision_of(config.device).dtype, remat=config.model.remat)
    return _training(config, roles, objective, shape, mesh)


def ppo_training(config: Config, shape: ModelShape, mesh: jax.sharding.Mesh) -> Training:
    """Proximal policy optimisation, with its value head."""
    ppo = config.align.ppo
    terms = PolicyTerms(
        clip_low=ppo.clip,
        clip_high=ppo.clip,
        drafters=drafter_terms(config, "align", ppo.exit_weight),
        entropy_coef=ppo.entropy_coef,
        value_coef=ppo.value_coef,
        value_clip=ppo.value_clip,
        with_logp=config.rollout.exact_logprobs,
    )
    roles = _policy_roles(config, shape, ppo.optimizer, terms.drafters)
    roles["value"] = Role(scalar_head(shape), ppo.value_optimizer)
    return _training(config, roles, _policy_objective(config, terms), shape, mesh)


def distill_training(config: Config, shape: ModelShape, mesh: jax.sharding.Mesh) -> Training:
    """The drafters alone, beside a policy that stays as it is."""
    terms = drafter_terms(config, "distill", 1.0 if "shallow" in config.speculation.drafters else 0.0)
    terms = terms._replace(draft_model=config.speculation.with_draft_model)
    objective = distillation_objective(terms, dtype=precision_of(config.device).dtype)
    return _training(config, _drafter_roles(config, shape, terms), objective, shape, mesh)


def drafter_terms(config: Config, stage: Stage, exit_weight: float) -> DrafterTerms:
    """Which of the drafters that a stage's own losses can train are trained in it, and how."""
    speculation, chains = config.speculation, None
    if speculation.with_eagle and stage in speculation.eagle_stages:
        chains = Chains(speculation.eagle_drafts, speculation.eagle_stride)
    return DrafterTerms(config.sampling.temperature, exit_weight, chains)


def _policy_roles(
    config: Config, shape: ModelShape, policy: OptimizerConfig, drafters: DrafterTerms
) -> dict[str, Role]:
    return {"policy": Role(transformer(shape), policy), **_drafter_roles(config, shape, drafters)}


def _drafter_roles(config: Config, shape: ModelShape, terms: DrafterTerms) -> dict[str, Role]:
    draft = draft_shape(config, shape) if terms.draft_model else None
    builds = {
        "exit": shallow_exit(shape) if terms.exit_weight else None,
        "eagle": eagle(shape) if terms.chains else None,
        "draft_model": transformer(draft) if draft else None,
    }
    return {name: Role(build, config.speculation.optimizer) for name, build in builds.items() if build}


def _policy_objective(config: Config, terms: PolicyTerms) -> Objective:
    return policy_objective(terms, dtype=precision_of(config.device).dtype, remat=config.model.remat)


def _training(
    config: Config, roles: dict[str, Role], objective: Objective, shape: ModelShape, mesh: jax.sharding.Mesh
) -> Training:
    return Training(
        roles,
        objective,
        shape,
        mesh,
        precision_of(config.device),
        config.faults.spike_factor,
        config.speculation.with_eagle,
        draft_shape(config, shape),
    )
