"""The sections on data: where it comes from, how it is tokenised, which tasks are made of it."""

from typing import Literal

from pydantic import Field, SecretStr, model_validator

from tlt_jax.config.base import (
    LARGEST_INT,
    AxisSize,
    CheckName,
    PathText,
    PositiveInt,
    Section,
    SourceKind,
    TaskKind,
)


class SourceConfig(Section):
    """Where documents come from."""

    kind: SourceKind = Field("stdlib", description="stdlib: the Python standard library's own source, tests left out")
    path: PathText | None = Field(None, description="a folder (directory) or a file (jsonl)")
    pattern: str = Field("**/*", description="which files of a directory, as a glob")
    text_field: str = Field("text", description="the field of a JSONL line or hub record that holds the text")
    on_bad_line: Literal["error", "skip"] = Field(
        "error", description="a JSONL line that cannot be read: stop, or count and go on"
    )
    hub_name: str | None = Field(None, description="data set on the hub (extra `hub`)")
    hub_split: str = Field("train", description="split of the hub data set")
    hub_token: SecretStr | None = Field(
        None, description="access token for the hub; never written to the run directory"
    )

    @model_validator(mode="after")
    def _complete(self):
        if self.kind in ("stdlib", "hub") and self.path:
            raise ValueError(
                f"source kind {self.kind!r} does not read `path` ({self.path!r}); expected kind directory or jsonl"
            )
        if self.kind in ("directory", "jsonl") and not self.path:
            raise ValueError(f"source kind {self.kind!r} needs `path`")
        if self.kind == "hub" and not self.hub_name:
            raise ValueError("source kind 'hub' needs `hub_name`")
        return self


class TokenizerConfig(Section):
    """The tokenizer: given, or trained on the training documents."""

    path: PathText | None = Field(None, description="a tokenizer.json to use; without it one is trained")
    vocab_size: int = Field(2048, ge=260, le=2**24, description="entries of the byte-level BPE that is trained")


class TasksConfig(Section):
    """Prompt and completion pairs for finetune and align."""

    kind: TaskKind = Field(
        "python_functions",
        description="python_functions: signature + docstring -> body, from the corpus; jsonl: a file of pairs",
    )
    path: PathText | None = Field(None, description="the JSONL file")
    prompt_field: str = Field("prompt", description="its field with the prompt")
    completion_field: str = Field("completion", description="its field with the completion")
    check: CheckName = Field(
        "python", description="success: python: parses as one function, is not trivial, ends; exact: is the real one"
    )
    max_prompt_tokens: int = Field(
        64, ge=2, le=LARGEST_INT, description="longer prompts are left out and counted, never cut"
    )
    max_completion_tokens: int = Field(
        64, ge=2, le=LARGEST_INT, description="longest completion, end-of-sequence token included"
    )

    @model_validator(mode="after")
    def _complete(self):
        if self.kind == "jsonl" and not self.path:
            raise ValueError("task kind 'jsonl' needs `path`")
        if self.kind != "jsonl" and self.path:
            raise ValueError(f"task kind {self.kind!r} does not read `path` ({self.path!r}); expected kind jsonl")
        return self


class DataConfig(Section):
    """Documents, tokenizer, tasks, and how they are packed and split."""

    source: SourceConfig = SourceConfig()
    tokenizer: TokenizerConfig = TokenizerConfig()
    tasks: TasksConfig = TasksConfig()
    context_length: AxisSize = Field(128, ge=8, description="tokens in a packed training row")
    held_out_fraction: float = Field(0.05, gt=0.0, lt=1.0, description="share of the files kept for evaluation")
    workers: int = Field(
        1, ge=0, le=256, description="threads that read batches ahead; 0: the step reads its own. The order is the same"
    )
    prefetch_factor: int = Field(2, ge=1, le=1024, description="batches held ready for each of `workers`")
    max_documents: PositiveInt | None = Field(None, description="use at most so many documents, chosen by the seed")
    cache_dir: PathText = Field("~/.cache/tlt_jax/data", description="folder of prepared data, one entry a digest")
