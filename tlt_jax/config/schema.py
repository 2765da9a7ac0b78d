"""Every key of a config: its type, range, unit and default. The whole config is one frozen `Config`."""

from itertools import product
from typing import Annotated, get_args

from pydantic import Field, model_validator

from tlt_jax.config.base import (
    LARGEST_INT,
    ControllerName,
    Drafter,
    DraftingName,
    PathText,
    PositiveFloat,
    PositiveInt,
    RematPolicy,
    Section,
    Stage,
    Verification,
)
from tlt_jax.config.data_sections import DataConfig
from tlt_jax.config.device_sections import DeviceConfig
from tlt_jax.config.run_sections import (
    BudgetConfig,
    CheckpointConfig,
    EvaluationConfig,
    FaultsConfig,
    ProfileConfig,
    RunConfig,
    TrackingConfig,
)
from tlt_jax.config.stage_sections import (
    AlignConfig,
    DistillConfig,
    FinetuneConfig,
    OptimizerConfig,
    PretrainConfig,
)


def _check_heads(width: int, heads: int, kv_heads: int) -> None:
    if heads % kv_heads:
        raise ValueError(f"kv_heads ({kv_heads}) must divide heads ({heads})")
    if width % heads:
        raise ValueError(f"heads ({heads}) must divide width ({width}): transformers loads no other Llama")


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
    loss_chunk: int = Field(
        0,
        ge=0,
        le=LARGEST_INT,
        description="next-token training: positions of a row whose logits are there at once; divides context_length;"
        " 0: all",
    )

    @model_validator(mode="after")
    def _shape(self):
        if self.init_from is None:
            _check_heads(self.width, self.heads, self.kv_heads)
            if self.exit_layer >= self.layers:
                raise ValueError(f"exit_layer ({self.exit_layer}) must be below layers ({self.layers})")
        return self


class DraftModelConfig(Section):
    """The separate small model of the drafter `draft_model`. Without init_from it is the one that `model.init_from`
    holds, or a fresh one of this shape; the rest of its shape is the model's."""

    init_from: PathText | None = Field(
        None, description="a Hugging Face directory of the same vocabulary, to take weights and shape from"
    )
    width: PositiveInt = Field(64, description="its width")
    layers: PositiveInt = Field(2, description="its layers")
    heads: PositiveInt = Field(2, description="its query heads")
    kv_heads: PositiveInt = Field(2, description="its key/value heads; divides its heads")
    head_dim: int = Field(32, ge=2, le=LARGEST_INT, multiple_of=2, description="width of one of its heads")
    hidden: PositiveInt = Field(192, description="hidden units of its gated MLP")

    @model_validator(mode="after")
    def _shape(self):
        _check_heads(self.width, self.heads, self.kv_heads)
        return self


class SpeculationConfig(Section):
    """How rollouts are decoded: the drafter, its training, and the pool of slots."""

    drafter: Drafter = Field(
        "shallow",
        description="who proposes tokens: the first layers; a layer of its own over the model's last states (eagle);"
        " a separate small model; n-grams of what was written; nobody; or whom the controller chooses",
    )
    draft_length: int = Field(5, ge=1, le=16, description="tokens proposed before each verification; 5-7 is classical")
    controller: ControllerName = Field(
        "cost_table", description="auto: how drafter and draft length are chosen for the most tokens a second"
    )
    auto_drafters: list[DraftingName] = Field(
        ["shallow", "eagle", "ngram"], min_length=1, description="auto: the drafters to choose from, beside none"
    )
    auto_draft_lengths: list[Annotated[int, Field(ge=1, le=16)]] = Field(
        [3, 5, 7], min_length=1, max_length=8, description="auto: the draft lengths that each drafter is tried with"
    )
    verification: Verification = Field(
        "block",
        description="which drafts stand. block, token, coupled: lossless (coupled: tokens depend on the seed alone)."
        " lenient: LOSSY, keeps more than the target would",
    )
    accept_threshold: float = Field(
        0.7,
        gt=0.0,
        le=1.0,
        description="lenient: a draft stands with p / (this * q); 1: lossless; 0.6-0.8 is classical",
    )
    accept_by_entropy: bool = Field(
        False, description="lenient: nearer to lossless the less sure the target is, by its entropy"
    )
    ngram_min: PositiveInt = Field(2, description="ngram: shortest suffix that counts as a match")
    ngram_max: PositiveInt = Field(4, description="ngram: longest suffix looked for")
    ngram_siblings: int = Field(
        7, ge=0, le=256, description="ngram: sequences of the same prompt, decoded at the same time, looked at too"
    )
    ngram_history: int = Field(
        4, ge=0, le=256, description="ngram: finished sequences of the same prompt that are looked at too, the latest"
    )
    block_verifies: PositiveInt = Field(
        8,
        description="verifications in a compiled block before the host looks for what has finished; it goes on up to"
        " four times as long where nothing has, or nobody waits",
    )
    slots: PositiveInt = Field(
        128, description="sequences decoded together; a finished one's slot takes the next prompt"
    )
    pool_sizes: int = Field(
        3, ge=1, le=8, description="sizes of the pool, each a quarter of the one before, for the last sequences"
    )
    optimizer: OptimizerConfig = Field(OptimizerConfig(), description="the drafters' own optimiser, in every stage")
    draft_model: DraftModelConfig = DraftModelConfig()
    eagle_stages: list[Stage] = Field(
        ["pretrain", "finetune", "align", "distill"],
        description="stages in which eagle is trained, beside the policy or alone (distill)",
    )
    eagle_drafts: int = Field(
        3, ge=1, le=8, description="eagle's training: drafts of a chain, each over the state that the one before left"
    )
    eagle_stride: PositiveInt = Field(8, description="eagle's training: a chain begins at every so-many-th position")
    exit_stride: PositiveInt = Field(
        4, description="supervised: the exit's loss looks at every so-many-th position; divides context_length"
    )

    @property
    def drafters(self) -> tuple[str, ...]:
        """All that may draft."""
        return tuple(self.auto_drafters) if self.drafter == "auto" else (self.drafter,)

    @property
    def with_eagle(self) -> bool:
        """Whether an eagle may draft."""
        return "eagle" in self.drafters

    @property
    def with_draft_model(self) -> bool:
        """Whether a draft model may draft."""
        return "draft_model" in self.drafters

    @model_validator(mode="after")
    def _order(self):
        if self.ngram_min > self.ngram_max:
            raise ValueError(f"ngram_min ({self.ngram_min}) must not exceed ngram_max ({self.ngram_max})")
        return self


class SamplingConfig(Section):
    """How rollouts are drawn in both reinforcement-learning stages."""

    temperature: float = Field(1.0, ge=1e-4, description="policy-gradient training needs one above 0")
    top_k: int = Field(0, ge=0, le=LARGEST_INT, description="keep the k likeliest tokens; 0: all")
    top_p: float = Field(1.0, gt=0.0, le=1.0, description="keep the likeliest tokens up to this mass; 1: all")


class RolloutConfig(Section):
    """What both reinforcement-learning stages take from rollouts."""

    exact_logprobs: bool = Field(
        False,
        description="score the sampled tokens anew with the update's own program before the first update: the ratio"
        " begins at exactly 1, for the time of one more epoch; false: the log-probs that verification yields",
    )


class Config(Section):
    """The whole config of a run."""

    run: RunConfig = RunConfig()
    device: DeviceConfig = DeviceConfig()
    stages: list[Stage] = Field(
        ["pretrain", "finetune", "align"],
        min_length=1,
        description="stages to run, in this order; distill, the last, trains the drafters alone",
    )
    budget: BudgetConfig = BudgetConfig()
    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    pretrain: PretrainConfig = PretrainConfig()
    finetune: FinetuneConfig = FinetuneConfig()
    align: AlignConfig = AlignConfig()
    distill: DistillConfig = DistillConfig()
    speculation: SpeculationConfig = SpeculationConfig()
    sampling: SamplingConfig = SamplingConfig()
    rollout: RolloutConfig = RolloutConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    faults: FaultsConfig = FaultsConfig()
    profile: ProfileConfig = ProfileConfig()
    tracking: TrackingConfig = TrackingConfig()

    @model_validator(mode="after")
    def _consistent(self):
        order = list(get_args(Stage))
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
        if self.model.loss_chunk:
            _divides("model.loss_chunk", self.model.loss_chunk, "data.context_length", self.data.context_length)
        warmup, policy, ppo = self.finetune.warmup, self.finetune.policy, self.align.ppo
        _divides("finetune.warmup.accumulation", warmup.accumulation, "finetune.warmup.batch_size", warmup.batch_size)
        _divides(
            "finetune.policy.minibatches",
            policy.minibatches,
            "finetune.policy.prompts * group_size",
            policy.prompts * policy.group_size,
        )
        _divides("align.ppo.minibatches", ppo.minibatches, "align.ppo.prompts", ppo.prompts)
        _divides("distill.minibatches", self.distill.minibatches, "distill.prompts", self.distill.prompts)
        speculation = self.speculation
        by_eagle = speculation.with_eagle and "distill" in speculation.eagle_stages
        trained = by_eagle or speculation.with_draft_model or "shallow" in speculation.drafters
        if "distill" in self.stages and not trained:
            raise ValueError(
                f"distill would train nothing: speculation.drafter is {speculation.drafter!r}; expected one that"
                " has weights (shallow, eagle, draft_model, or auto with one of them), and eagle_stages with distill"
            )
        reward = self.align.reward_model
        _divides("align.reward_model.accumulation", reward.accumulation, "batch_size", reward.batch_size)
        if self.model.init_from is None:
            self._splits()
        return self

    def _splits(self) -> None:
        """Raises ValueError where the mesh's sizes, as far as they are known here, do not divide the models'."""
        mesh, tokenizer, draft = self.device.mesh, self.data.tokenizer, self.speculation.draft_model
        models: dict[str, ModelConfig | DraftModelConfig] = {"model": self.model}
        if self.speculation.with_draft_model and draft.init_from is None:
            models["speculation.draft_model"] = draft
        split = {"tensor": ["heads", "kv_heads", "hidden"], "fsdp": ["width"]}
        for (section, model), (axis, names) in product(models.items(), split.items()):
            for name in names if getattr(mesh, axis) > 0 else []:
                _divides(f"device.mesh.{axis}", getattr(mesh, axis), f"{section}.{name}", getattr(model, name))
        if mesh.tensor > 0 and tokenizer.path is None:
            _divides("device.mesh.tensor", mesh.tensor, "data.tokenizer.vocab_size", tokenizer.vocab_size)


def _divides(key: str, value: int, whole_key: str, whole: int) -> None:
    if whole % value:
        raise ValueError(f"{key} ({value}) must divide {whole_key} ({whole})")
