"""Budgets: one total in steps, tokens or seconds, divided over stages and their phases by shares."""

from dataclasses import asdict, dataclass
from typing import Any

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


def phase_budget(config: Config, stage: str, part: tuple[float, float], before: list[Spent]) -> Budget:
    """The budget of a phase that takes the `part` (from, to) of its stage, after the phases `before` it.

    Ends are cumulative over the run: what an earlier phase left over or overran is the next one's gain or loss, so the
    total holds.
    """
    shares: dict[str, float] = {s: getattr(config.budget, s) for s in config.stages}
    whole = sum(shares.values())
    names = list(shares)
    earlier = sum(shares[name] for name in names[: names.index(stage)])
    end = config.budget.total * (earlier + shares[stage] * part[1]) / whole
    if config.budget.unit != "seconds":
        end = round(end)
    used = sum(getattr(spent, config.budget.unit) for spent in before)
    return Budget(config.budget.unit, max(end - used, 0.0))
