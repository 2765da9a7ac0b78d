"""The sections on the stages: their batches, objectives and optimisers."""

from pydantic import Field, model_validator

from tlt_jax.config.base import (
    LARGEST_INT,
    Aggregation,
    AxisSize,
    DecayName,
    DistillSource,
    Fraction,
    KLController,
    KLEstimator,
    NonNegativeFloat,
    OptimizerName,
    PositiveFloat,
    PositiveInt,
    Section,
)


class OptimizerConfig(Section):
    """An optimiser of optax and its learning rate over a phase."""

    name: OptimizerName = Field("adamw", description="adamw; lion; muon (matrices by Muon, the rest by AdamW)")
    learning_rate: PositiveFloat = Field(1e-3, description="peak learning rate")
    adam_learning_rate: PositiveFloat | None = Field(
        None, description="muon: peak rate of what AdamW handles; default: the same"
    )
    weight_decay: NonNegativeFloat = Field(0.0, description="decoupled weight decay, on matrices alone")
    beta1: float = Field(0.9, ge=0.0, lt=1.0, description="decay of the gradient's running mean (Adam, Lion)")
    beta2: float = Field(0.95, ge=0.0, lt=1.0, description="decay of its square's (Adam), or of the momentum (Lion)")
    clip_norm: PositiveFloat = Field(1.0, description="largest global gradient norm")
    warmup_fraction: Fraction = Field(0.05, description="share of the phase over which the rate rises from 0")
    decay: DecayName = Field("cosine", description="shape of the fall after warm-up")
    decay_fraction: Fraction = Field(0.2, description="wsd: share of the phase, at its end, over which the rate falls")
    final_fraction: Fraction = Field(0.1, description="rate at the end, as a share of the peak")


class PretrainConfig(Section):
    """Stage 1: next-token training."""

    batch_size: AxisSize = Field(32, description="rows of context_length tokens an update")
    accumulation: PositiveInt = Field(1, description="microbatches an update; divides batch_size")
    exit_weight: NonNegativeFloat = Field(
        0.3, description="weight of the early exit's loss, which trains the shallow drafter"
    )
    eval_every: PositiveInt = Field(200, description="steps between evaluations")
    eval_rows: PositiveInt = Field(128, description="held-out rows an evaluation reads")
    optimizer: OptimizerConfig = OptimizerConfig()


class WarmupConfig(Section):
    """Supervised warm-up: next-token loss on the completion alone."""

    share: Fraction = Field(0.3, description="largest share of the stage's budget")
    batch_size: AxisSize = Field(32, description="packed rows an update")
    accumulation: PositiveInt = Field(1, description="microbatches an update; divides batch_size")
    exit_weight: NonNegativeFloat = Field(0.3, description="weight of the early exit's loss")
    eval_every: PositiveInt = Field(25, description="steps between evaluations")
    patience: PositiveInt = Field(3, description="evaluations without a better held-out loss before the warm-up ends")
    optimizer: OptimizerConfig = OptimizerConfig()


class RewardWeights(Section):
    """Weights of the finetune stage's rewards."""

    quality: NonNegativeFloat = Field(1.0, description="checkable quality of the completion, 0 to 1")
    diversity: NonNegativeFloat = Field(0.3, description="difference from the rest of the group, 0 to 1")
    speed: NonNegativeFloat = Field(
        0.05, description="accepted draft tokens per target call over draft_length, 0 to 1; never seconds"
    )


class CurriculumConfig(Section):
    """From short completions to all, by success."""

    phases: PositiveInt = Field(5, description="phases from short completions to all")
    advance_at: Fraction = Field(0.4, description="success rate (running mean) that moves to the next phase")
    smoothing: float = Field(0.7, ge=0.0, lt=1.0, description="weight of the past in the running mean")


class GroupPolicyConfig(Section):
    """Group-relative policy optimisation."""

    prompts: PositiveInt = Field(16, description="prompts a step")
    group_size: int = Field(8, ge=2, le=LARGEST_INT, description="completions a prompt; the baseline is their mean")
    epochs: PositiveInt = Field(1, description="passes over a step's rollouts")
    minibatches: PositiveInt = Field(2, description="updates a pass; divides prompts * group_size")
    accumulation: PositiveInt = Field(1, description="microbatches an update, of packed rows")
    clip_low: PositiveFloat = Field(0.2, lt=1.0, description="the ratio is clipped below 1 - clip_low")
    clip_high: PositiveFloat = Field(0.2, description="the ratio is clipped above 1 + clip_high")
    normalize_by_std: bool = Field(True, description="divide a group's advantages by their standard deviation")
    kl_coef: NonNegativeFloat = Field(0.15, description="weight of the KL to the reference, in the loss")
    kl_estimator: KLEstimator = Field(
        "k2", description="k2 has the gradient of the KL; k1 has none in expectation; k3 another's"
    )
    entropy_coef: NonNegativeFloat = Field(0.0, description="weight of the entropy bonus")
    aggregation: Aggregation = Field("token_mean", description="mean over tokens, or over sequences of their means")
    exit_weight: NonNegativeFloat = Field(
        0.3, description="weight of the drafter's loss, which leaves the policy's gradient alone"
    )
    eval_every: PositiveInt = Field(20, description="steps between evaluations")
    rewards: RewardWeights = RewardWeights()
    curriculum: CurriculumConfig = CurriculumConfig()
    optimizer: OptimizerConfig = OptimizerConfig(learning_rate=3e-4)


class FinetuneConfig(Section):
    """Stage 2: a supervised warm-up, then reinforcement learning on checkable rewards."""

    warmup: WarmupConfig = WarmupConfig()
    policy: GroupPolicyConfig = GroupPolicyConfig()


class RewardModelConfig(Section):
    """Bradley-Terry reward model: the real completion against the model's own, matched in length."""

    share: Fraction = Field(0.35, description="share of the stage's budget")
    pairs: PositiveInt = Field(1024, description="pairs asked for, of training files")
    held_out_pairs: PositiveInt = Field(256, description="pairs asked for, of held-out files")
    length_tolerance: NonNegativeFloat = Field(0.25, description="largest relative difference in length within a pair")
    batch_size: AxisSize = Field(32, description="pairs an update")
    accumulation: PositiveInt = Field(1, description="microbatches an update; divides batch_size")
    eval_every: PositiveInt = Field(25, description="steps between evaluations")
    optimizer: OptimizerConfig = OptimizerConfig(learning_rate=5e-4)


class PPOConfig(Section):
    """Proximal policy optimisation against the reward model."""

    prompts: PositiveInt = Field(64, description="prompts a step, one completion each")
    epochs: PositiveInt = Field(2, description="passes over a step's rollouts")
    minibatches: PositiveInt = Field(2, description="updates a pass; divides prompts")
    accumulation: PositiveInt = Field(1, description="microbatches an update, of packed rows")
    clip: PositiveFloat = Field(0.2, lt=1.0, description="clip range of the ratio")
    value_clip: PositiveFloat = Field(0.2, description="clip range of the value's change")
    value_coef: NonNegativeFloat = Field(0.1, description="weight of the value loss")
    gamma: Fraction = Field(1.0, description="discount")
    gae_lambda: Fraction = Field(0.95, description="lambda of generalised advantage estimation")
    kl_coef: NonNegativeFloat = Field(0.1, description="weight of the KL to the reference, subtracted from the reward")
    kl_controller: KLController = Field("adaptive", description="fixed, or steered to kl_target")
    kl_target: PositiveFloat = Field(2.0, description="adaptive: KL to hold, nats a sequence")
    kl_horizon: PositiveFloat = Field(2000.0, description="adaptive: sequences over which the coefficient reacts")
    entropy_coef: NonNegativeFloat = Field(0.01, description="weight of the entropy bonus")
    quality_coef: NonNegativeFloat = Field(
        1.0, description="weight of the checkable quality (0 to 1) that is added to the reward model's score"
    )
    truncated_reward: float = Field(
        -2.0, description="reward of a completion that does not end, in standard deviations of the reward model"
    )
    aggregation: Aggregation = Field("token_mean", description="mean over tokens, or over sequences of their means")
    exit_weight: NonNegativeFloat = Field(
        0.3, description="weight of the drafter's loss, which leaves the policy's gradient alone"
    )
    eval_every: PositiveInt = Field(20, description="steps between evaluations")
    optimizer: OptimizerConfig = OptimizerConfig(learning_rate=2e-4)
    value_optimizer: OptimizerConfig = Field(
        OptimizerConfig(learning_rate=2e-3), description="the value head's own optimiser"
    )

    @model_validator(mode="after")
    def _controller(self):
        if self.kl_controller == "adaptive" and self.kl_horizon < self.prompts:
            raise ValueError(
                f"kl_horizon ({self.kl_horizon:g}) must not be below prompts ({self.prompts}): the adaptive coefficient"
                " changes by up to 0.2 * prompts / kl_horizon a step"
            )
        return self


class AlignConfig(Section):
    """Stage 3: a reward model, then PPO."""

    reward_model: RewardModelConfig = RewardModelConfig()
    ppo: PPOConfig = PPOConfig()


class DistillConfig(Section):
    """The last stage: the drafters alone, on what the policy writes, the policy as it is."""

    source: DistillSource = Field(
        "tasks", description="tasks: their prompts; text: the first max_prompt_tokens of rows of the training text"
    )
    prompts: PositiveInt = Field(128, description="prompts a step, one completion each")
    greedy_fraction: Fraction = Field(
        0.25, description="share of the completions that are greedy; the rest are drawn as `sampling` says"
    )
    epochs: PositiveInt = Field(1, description="passes over a step's completions")
    minibatches: PositiveInt = Field(4, description="updates a pass; divides prompts")
    accumulation: PositiveInt = Field(1, description="microbatches an update, of packed rows")
    eval_every: PositiveInt = Field(50, description="steps between evaluations")
