"""Every key of a config: its type, range, unit and default. The whole config is one frozen `Config`."""

import re
from typing import Literal

from pydantic import Field, field_validator, model_validator

from tlt_jax.config.base import (
    LARGEST_INT,
    Aggregation,
    DecayName,
    Drafter,
    Fraction,
    KLController,
    KLEstimator,
    NonNegativeFloat,
    OptimizerName,
    PathText,
    PositiveFloat,
    PositiveInt,
    RematPolicy,
    Section,
    Stage,
    TrackerName,
)
from tlt_jax.config.data_sections import DataConfig
from tlt_jax.config.device_sections import DeviceConfig


class RunConfig(Section):
    """The run: its name, its directory, its seed, and what it leaves."""

    name: str = Field("run", description="name of the run directory below output_dir: letters, digits, ._+-")
    output_dir: PathText = Field("runs", description="folder that holds run directories")
    seed: int = Field(0, ge=0, le=LARGEST_INT, description="seeds initialisation, data order and sampling")
    resume: Literal["auto", "never"] = Field(
        "auto", description="auto: continue what the run directory holds; never: start anew, refuse to overwrite"
    )
    log_every: PositiveInt = Field(5, description="steps between two looks at the device; every step is still written")
    samples: int = Field(4, ge=0, le=LARGEST_INT, description="completions shown and kept at each look at the samples")
    trackers: list[TrackerName] = Field(["tensorboard"], description="trackers beside metrics.jsonl")
    export: bool = Field(True, description="write the final model as a Hugging Face directory")

    @field_validator("name")
    @classmethod
    def _name(cls, name: str) -> str:
        if not re.fullmatch(r"\w[\w.+-]*", name):
            raise ValueError(f"is {name!r}; expected letters, digits and ._+-, the first a letter or digit")
        return name


class ModelConfig(Section):
    """A decoder-only transformer (Llama's architecture); with init_from, its shape comes from there."""

    init_from: PathText | None = Field(
        None,
        description="a Hugging Face directory, or a run directory of ours, to take weights, shape and tokenizer from",
    )
    width: PositiveInt = Field(128, description="model width D")
    layers: PositiveInt = Field(4, description="layers L")
    heads: PositiveInt = Field(4, description="query heads H")
    kv_heads: PositiveInt = Field(2, description="key/value heads K; divides heads")
    head_dim: int = Field(32, ge=2, le=LARGEST_INT, multiple_of=2, description="width of one head")
    hidden: PositiveInt = Field(352, description="hidden units F of the gated MLP")
    rope_theta: PositiveFloat = Field(10_000.0, description="base of the rotary embedding")
    norm_eps: PositiveFloat = Field(1e-5, description="epsilon of RMSNorm")
    tied: bool = Field(True, description="the output head is the embedding, transposed")
    exit_layer: PositiveInt = Field(2, description="the shallow drafter leaves after this many layers; below `layers`")
    exit_rank: PositiveInt = Field(32, description="rank of the shallow drafter's own residual adapter")
    remat: RematPolicy = Field(
        "none", description="what the backward pass recomputes: none, all but matmuls, everything"
    )

    @model_validator(mode="after")
    def _shape(self):
        if self.init_from is None:
            if self.heads % self.kv_heads:
                raise ValueError(f"kv_heads ({self.kv_heads}) must divide heads ({self.heads})")
            if self.width % self.heads:
                raise ValueError(
                    f"heads ({self.heads}) must divide width ({self.width}): transformers loads no other Llama"
                )
            if self.exit_layer >= self.layers:
                raise ValueError(f"exit_layer ({self.exit_layer}) must be below layers ({self.layers})")
        return self


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


class BudgetConfig(Section):
    """One total, divided over the stages that run by their shares."""

    unit: Literal["steps", "tokens", "seconds"] = Field(
        "steps", description="what the total counts; only steps and tokens replay exactly"
    )
    total: float = Field(1000.0, gt=0.0, le=1e15, description="the whole budget, in `unit`")
    pretrain: float = Field(0.4, ge=0.0, le=1e6, description="share of the pretrain stage")
    finetune: float = Field(0.3, ge=0.0, le=1e6, description="share of the finetune stage")
    align: float = Field(0.3, ge=0.0, le=1e6, description="share of the align stage")


class PretrainConfig(Section):
    """Stage 1: next-token training."""

    batch_size: PositiveInt = Field(32, description="rows of context_length tokens an update")
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
    batch_size: PositiveInt = Field(32, description="packed rows an update")
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
    batch_size: PositiveInt = Field(32, description="pairs an update")
    eval_every: PositiveInt = Field(25, description="steps between evaluations")
    optimizer: OptimizerConfig = OptimizerConfig(learning_rate=5e-4)


class PPOConfig(Section):
    """Proximal policy optimisation against the reward model."""

    prompts: PositiveInt = Field(64, description="prompts a step, one completion each")
    epochs: PositiveInt = Field(2, description="passes over a step's rollouts")
    minibatches: PositiveInt = Field(2, description="updates a pass; divides prompts")
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


class SpeculationConfig(Section):
    """How rollouts are decoded: the drafter, its training, and the pool of slots."""

    drafter: Drafter = Field(
        "shallow", description="who proposes tokens: the first layers, n-grams of the sequence, or nobody"
    )
    draft_length: int = Field(5, ge=1, le=16, description="tokens proposed before each verification; 5-7 is classical")
    ngram_min: PositiveInt = Field(2, description="ngram: shortest suffix that counts as a match")
    ngram_max: PositiveInt = Field(4, description="ngram: longest suffix looked for")
    block_verifies: PositiveInt = Field(
        8, description="verifications in a compiled block, between two looks of the host"
    )
    slots: PositiveInt = Field(
        128, description="sequences decoded together; a finished one's slot takes the next prompt"
    )
    optimizer: OptimizerConfig = Field(OptimizerConfig(), description="the drafter's own optimiser, in every stage")
    exit_stride: PositiveInt = Field(
        4, description="supervised: the exit's loss looks at every so-many-th position; divides context_length"
    )

    @model_validator(mode="after")
    def _order(self):
        if self.ngram_min > self.ngram_max:
            raise ValueError(f"ngram_min ({self.ngram_min}) must not exceed ngram_max ({self.ngram_max})")
        return self


class SamplingConfig(Section):
    """How rollouts are drawn in both reinforcement-learning stages."""

    temperature: PositiveFloat = Field(1.0, description="policy-gradient training needs one above 0")
    top_k: int = Field(0, ge=0, le=LARGEST_INT, description="keep the k likeliest tokens; 0: all")
    top_p: float = Field(1.0, gt=0.0, le=1.0, description="keep the likeliest tokens up to this mass; 1: all")


class EvaluationConfig(Section):
    """What evaluations look at."""

    prompts: PositiveInt = Field(256, description="held-out prompts completed at each evaluation of completions")
    batch_size: PositiveInt = Field(64, description="rows of an evaluation's batch")


class CheckpointConfig(Section):
    """When checkpoints are saved, and how many are kept."""

    every_steps: PositiveInt | None = Field(None, description="save each so many steps")
    every_seconds: PositiveFloat | None = Field(120.0, description="save each so many seconds")
    keep: PositiveInt = Field(2, description="newest checkpoints kept")


class FaultsConfig(Section):
    """What is done about updates that are not finite, or whose gradient is a spike: they are skipped and counted."""

    spike_factor: NonNegativeFloat = Field(
        50.0, description="a gradient norm above so many times its running mean is a spike; 0: none is"
    )
    rollback_after: PositiveInt = Field(
        8, description="steps skipped in a row before the phase goes back to its newest checkpoint and skips their data"
    )
    stop_after: int = Field(3, ge=0, le=LARGEST_INT, description="such returns of a phase before the run stops instead")


class Config(Section):
    """The whole config of a run."""

    run: RunConfig = RunConfig()
    device: DeviceConfig = DeviceConfig()
    stages: list[Stage] = Field(
        ["pretrain", "finetune", "align"], min_length=1, description="stages to run, in this order"
    )
    budget: BudgetConfig = BudgetConfig()
    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    pretrain: PretrainConfig = PretrainConfig()
    finetune: FinetuneConfig = FinetuneConfig()
    align: AlignConfig = AlignConfig()
    speculation: SpeculationConfig = SpeculationConfig()
    sampling: SamplingConfig = SamplingConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    faults: FaultsConfig = FaultsConfig()

    @model_validator(mode="after")
    def _consistent(self):
        order = ["pretrain", "finetune", "align"]
        if self.stages != [stage for stage in order if stage in self.stages]:
            raise ValueError(f"stages is {self.stages}; expected each at most once, in the order {', '.join(order)}")
        if sum(getattr(self.budget, stage) for stage in self.stages) <= 0:
            raise ValueError("budget: the shares of the stages that run add up to 0")
        tasks = self.data.tasks
        longest, row = tasks.max_prompt_tokens + tasks.max_completion_tokens, self.data.context_length
        if "finetune" in self.stages and longest > row + 1:
            raise ValueError(
                f"data.tasks.max_prompt_tokens + max_completion_tokens ({longest}) must not exceed"
                f" data.context_length + 1 ({row + 1}): finetune packs whole tasks into its rows"
            )
        _divides("pretrain.accumulation", self.pretrain.accumulation, "pretrain.batch_size", self.pretrain.batch_size)
        _divides(
            "speculation.exit_stride", self.speculation.exit_stride, "data.context_length", self.data.context_length
        )
        warmup, policy, ppo = self.finetune.warmup, self.finetune.policy, self.align.ppo
        _divides("finetune.warmup.accumulation", warmup.accumulation, "finetune.warmup.batch_size", warmup.batch_size)
        _divides(
            "finetune.policy.minibatches",
            policy.minibatches,
            "finetune.policy.prompts * group_size",
            policy.prompts * policy.group_size,
        )
        _divides("align.ppo.minibatches", ppo.minibatches, "align.ppo.prompts", ppo.prompts)
        if self.model.init_from is None:
            self._splits()
        return self

    def _splits(self) -> None:
        """Raises ValueError where the mesh's sizes, as far as they are known here, do not divide the model's."""
        mesh, model, tokenizer = self.device.mesh, self.model, self.data.tokenizer
        split = {"tensor": ["heads", "kv_heads", "hidden"], "fsdp": ["width"]}
        for axis, names in split.items():
            for name in names if getattr(mesh, axis) > 0 else []:
                _divides(f"device.mesh.{axis}", getattr(mesh, axis), f"model.{name}", getattr(model, name))
        if mesh.tensor > 0 and tokenizer.path is None:
            _divides("device.mesh.tensor", mesh.tensor, "data.tokenizer.vocab_size", tokenizer.vocab_size)


def _divides(key: str, value: int, whole_key: str, whole: int) -> None:
    if whole % value:
        raise ValueError(f"{key} ({value}) must divide {whole_key} ({whole})")
