"""What the sections share: their base class, the names that they offer, and their number types.

Where a name selects an implementation, a registry beside the implementations holds the same names; a test compares
them. No JAX is imported here or in any section, so that `validate` answers at once.
"""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

Stage = Literal["pretrain", "finetune", "align", "distill"]  # in the order in which they run
DraftingName = Literal["shallow", "eagle", "draft_model", "ngram"]
Drafter = Literal["shallow", "eagle", "draft_model", "ngram", "off", "auto"]
ControllerName = Literal["cost_table", "bandit", "policy_gradient"]
Verification = Literal["block", "token", "coupled", "lenient"]
OptimizerName = Literal["adamw", "lion", "muon"]
DecayName = Literal["cosine", "linear", "wsd"]
PrecisionLevel = Literal["auto", "O0", "O1", "O2"]
RematPolicy = Literal["none", "dots", "full"]
SourceKind = Literal["stdlib", "directory", "jsonl", "hub"]
DistillSource = Literal["tasks", "text"]
TaskKind = Literal["python_functions", "jsonl"]
CheckName = Literal["python", "exact"]
KLEstimator = Literal["k1", "k2", "k3"]
KLController = Literal["fixed", "adaptive"]
Aggregation = Literal["token_mean", "sequence_mean"]
RewardName = Literal["quality", "diversity", "speed"]
TrackerName = Literal["tensorboard", "wandb", "mlflow"]

LARGEST_INT = 2**31 - 1  # what an array's dimension, and a count on a device, can hold


def usable_path(text: str) -> str:
    """`text` if a system can look for it as a path. Raises ValueError, saying what is wrong, else."""
    if not text.strip():
        raise ValueError(f"is {text!r}; expected a path")
    if "\0" in text:
        raise ValueError(f"is {text!r}; expected a path without zero bytes")
    try:
        Path(text).expanduser()
    except RuntimeError:
        raise ValueError(f"is {text!r}; expected a path: there is no such user's home directory here") from None
    return text


PathText = Annotated[str, AfterValidator(usable_path)]
PathOrNone = Annotated[str, AfterValidator(lambda text: text and usable_path(text))]  # "" for none
PositiveInt = Annotated[int, Field(ge=1, le=LARGEST_INT)]
AxisSize = Annotated[int, Field(ge=1, le=2**20)]  # rows, or tokens of a row: more is a slip of the key
Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
PositiveFloat = Annotated[float, Field(gt=0.0)]
NonNegativeFloat = Annotated[float, Field(ge=0.0)]


class Section(BaseModel):
    """Base of every section: unknown keys are refused, types are not coerced, values do not change."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)
