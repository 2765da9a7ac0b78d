"""Budgets: one total in steps, tokens or seconds, divided over stages and their phases by shares."""

from dataclasses import asdict, dataclass
from typing import Any

from tlt_jax.config.base import Stage
from tlt_jax.config.schema import Config


@dataclass
class Spent:
    """What a phase has used so far."""

    steps: int = 0
    tokens: int = 0
    seconds: float = 0.0

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Budget:
    """An amount of one unit."""

    unit: str
    amount: float

    def progress(self, spent: Spent) -> float:
        """Share of the budget that is used, 0 to 1; a budget of 0 is used up from the start."""
        return min(getattr(spent, self.unit) / self.amount, 1.0) if self.amount > 0 else 1.0


def phase_budget(config: Config, stage: Stage, end: float, before: list[Spent]) -> Budget:
    """The budget of a phase that ends at the share `end` of its stage's, after the stage's phases `before` it.

    What an earlier phase of the stage left over or overran is this one's gain or loss, so the stage's total holds.
    """
    shares: dict[str, float] = {name: getattr(config.budget, name) for name in config.stages}
    amount = config.budget.total * end * shares[stage] / sum(shares.values())
    if config.budget.unit != "seconds":
        amount = round(amount)
    return Budget(config.budget.unit, max(amount - sum(getattr(spent, config.budget.unit) for spent in before), 0.0))
