"""What a phase remembers of steps without an update, and of its returns to a checkpoint for them."""

from dataclasses import asdict, dataclass
from typing import Any

SETTLED = 100  # updates in a row after which earlier returns no longer count


@dataclass
class Trouble:
    """`skipped`: steps without an update in a row, up to now; `sound`: steps with one; `returns`: to a checkpoint;
    `checkpoint`: the phase's newest that was not saved within a row of skipped steps."""

    skipped: int = 0
    sound: int = 0
    returns: int = 0
    checkpoint: int | None = None

    def count(self, skipped: bool) -> None:
        """Takes up a step."""
        self.skipped, self.sound = (self.skipped + 1, 0) if skipped else (0, self.sound + 1)
        if self.sound >= SETTLED:
            self.returns = 0

    def saved(self, number: int) -> None:
        """Takes up a checkpoint: what is gone back to is from outside of such a row."""
        if not self.skipped:
            self.checkpoint = number

    def to_dict(self) -> dict[str, Any]:
        """As JSON values: `Trouble(**d)` reads them."""
        return asdict(self)
