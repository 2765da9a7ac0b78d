"""Rewards that can be checked: quality of a completion, diversity within its group, speed of its decoding.

Each is a number in [0, 1]; the config weighs and adds them.
"""

import ast
import logging
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from tlt_jax.config.stage_sections import RewardWeights

log = logging.getLogger("tlt_jax")


@dataclass(frozen=True)
class Completion:
    """What a reward sees: texts, tokens (without EOS), whether it ended by itself, its counts of decoding, the real
    completion, and the name of the task's check."""

    prompt: str
    text: str
    tokens: np.ndarray
    ended: bool
    accepted: int
    target_calls: int
    reference: str = ""
    check: str = "python"


Reward = Callable[[Sequence[Completion], int], np.ndarray]


def python_body(prompt: str, completion: str) -> ast.FunctionDef | ast.AsyncFunctionDef | None:
    """The function that prompt (signature and docstring) and completion make; None if they do not parse as one."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = ast.parse(prompt + completion)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    if len(tree.body) != 1 or not isinstance(tree.body[0], ast.FunctionDef | ast.AsyncFunctionDef):
        return None
    return tree.body[0]


def is_valid(prompt: str, completion: str, ended: bool) -> bool:
    """The completion ends by itself, parses with its prompt as one function, and is not trivial: at least two real
    statements (neither `pass`, nor a bare constant such as a docstring), and nothing copied whole from the prompt."""
    function = python_body(prompt, completion) if ended else None
    if function is None:
        return False
    statements = [node for node in ast.walk(function) if isinstance(node, ast.stmt) and node is not function]
    real = [node for node in statements if not isinstance(node, ast.Pass) and not _bare_constant(node)]
    return len(real) >= 2 and completion.strip() not in prompt


def _bare_constant(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def python_check(c: Completion) -> float:
    """1 for a valid body; 0.2 for one that ends and parses but is trivial; else 0."""
    if is_valid(c.prompt, c.text, c.ended):
        return 1.0
    return 0.2 if c.ended and python_body(c.prompt, c.text) is not None else 0.0


def exact_check(c: Completion) -> float:
    """1 for a completion that ends and equals the real one, white space at its ends aside; else 0."""
    return float(c.ended and c.text.strip() == c.reference.strip())


CHECKS: dict[str, Callable[[Completion], float]] = {"python": python_check, "exact": exact_check}


def quality(group: Sequence[Completion], draft_length: int) -> np.ndarray:
    """What the task's check gives, 0 to 1; 1 is success."""
    return np.array([CHECKS[c.check](c) for c in group], np.float32)


def diversity(group: Sequence[Completion], draft_length: int) -> np.ndarray:
    """1 - the mean Jaccard similarity of a completion's token bigrams with those of the others in its group."""
    sets = [set(zip(c.tokens[:-1].tolist(), c.tokens[1:].tolist(), strict=True)) or {(-1, -1)} for c in group]
    similarity = np.array([[len(a & b) / len(a | b) for b in sets] for a in sets], np.float32)
    others = max(len(group) - 1, 1)
    return 1.0 - (similarity.sum(axis=1) - np.diag(similarity)) / others


def speed(group: Sequence[Completion], draft_length: int) -> np.ndarray:
    """Accepted draft tokens a target call, over the draft length; 0 without a drafter. Counts, never seconds."""
    return np.array([c.accepted / max(c.target_calls * draft_length, 1) for c in group], np.float32)


REWARDS: dict[str, Reward] = {
    "quality": quality,
    "diversity": diversity,
    "speed": speed,
}


def score_groups(
    completions: Sequence[Completion], group_size: int, weights: RewardWeights, draft_length: int
) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """(weighted sum [B], each reward [B] by name) of completions whose groups lie next to each other.

    Diversity counts for valid completions alone: otherwise noise would be paid for being different. A group on which
    a reward raises, or gives anything but finite numbers, gets 0 and is counted in "failures"; raises RuntimeError if
    most groups fail.
    """
    groups = [completions[i : i + group_size] for i in range(0, len(completions), group_size)]
    failures = np.zeros(len(groups), bool)

    def guarded(function: Reward, index: int) -> np.ndarray:
        size = len(groups[index])
        try:
            found = np.asarray(function(groups[index], draft_length), np.float32)
            if found.shape != (size,) or not np.isfinite(found).all():
                raise ValueError(f"a reward gave {found}; expected {size} finite numbers")
            return found
        except Exception:
            log.warning("a reward failed on a group of completions", exc_info=True)
            failures[index] = True
            return np.zeros(size, np.float32)

    parts = {
        name: np.concatenate([guarded(function, i) for i in range(len(groups))]) for name, function in REWARDS.items()
    }
    if failures.mean() > 0.5:
        raise RuntimeError(f"rewards failed on {failures.sum()} of {len(groups)} groups")
    failed = np.repeat(failures, [len(group) for group in groups])
    parts = {name: np.where(failed, 0.0, part) for name, part in parts.items()}
    parts["failures"] = failed.astype(np.float32)
    earned = (parts["quality"] >= 1.0).astype(np.float32)
    total = (
        weights.quality * parts["quality"]
        + earned * weights.diversity * parts["diversity"]
        + weights.speed * parts["speed"]
    )
    return total.astype(np.float32), parts
