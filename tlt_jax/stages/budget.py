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


def spent(unit: str, amount: float) -> Spent:
    """What a phase has used that took `amount` of a unit."""
    used = Spent()
    setattr(used, unit, amount)
    return used


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
    unit, shares = config.budget.unit, [getattr(config.budget, name) for name in config.stages]
    index = config.stages.index(stage)
    earlier = sum(shares[:index])
    bounds = [config.budget.total * share / sum(shares) for share in (earlier, earlier + end * shares[index])]
    if unit != "seconds":  # rounded where one stage ends and the next begins, so that nothing of the total is lost
        bounds = [round(bound) for bound in bounds]
    return Budget(unit, max(bounds[1] - bounds[0] - sum(getattr(used, unit) for used in before), 0.0))
