"""The exact distribution of everything a tiny model can generate, computed without the decoder."""

from dataclasses import dataclass
from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
from scipy import stats

from tlt_jax.models.heads import exit_logits
from tlt_jax.models.transformer import hidden_states, logits

VOCAB, EOS = 3, 2


@dataclass(frozen=True)
class Setting:
    temperature: float
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0


def filtered(probs: np.ndarray, setting: Setting) -> np.ndarray:
    """Top-k, then top-p, then min-p, on one distribution, written out token by token in float64."""
    order = sorted(range(len(probs)), key=lambda i: (-probs[i], i))
    kept = order[: setting.top_k] if setting.top_k else order
    total = sum(probs[i] for i in kept)
    mass, result = 0.0, np.zeros(len(probs))
    for i in kept:
        if mass < setting.top_p or setting.top_p >= 1.0:
            result[i] = probs[i]
        mass += probs[i] / total
    result[result < setting.min_p * result.max()] = 0.0
    return result / result.sum()


def outcomes(length: int) -> list[tuple[int, ...]]:
    """Every completion of at most `length` tokens: cut at the limit, or ended by its only EOS."""
    found = []
    for size in range(1, length + 1):
        for body in product([t for t in range(VOCAB) if t != EOS], repeat=size - 1):
            found.append((*body, EOS))
            if size == length:
                found += [(*body, t) for t in range(VOCAB) if t != EOS]
    return found


def exact(
    model, prompt: list[int], length: int, setting: Setting
) -> dict[tuple[int, ...], tuple[float, list[float], list[float]]]:
    """{completion: (probability, policy log-prob a token, sampler log-prob a token)}."""
    every = outcomes(length)
    # One padded shape for all prompts and lengths, so that the model is compiled once.
    rows = np.zeros((512, 16), np.int32)
    for row, outcome in zip(rows, every, strict=False):
        row[: len(prompt) + len(outcome)] = [*prompt, *outcome]
    row_logits = np.asarray(_logits(model, rows)[0], np.float64)
    table = {}
    for outcome, per_position in zip(every, row_logits, strict=False):
        policy, sampler = [], []
        for i, token in enumerate(outcome):
            scaled = per_position[len(prompt) + i - 1] / setting.temperature
            probs = np.exp(scaled - scaled.max())
            probs /= probs.sum()
            policy.append(float(np.log(probs[token])))
            with np.errstate(divide="ignore"):
                sampler.append(float(np.log(filtered(probs, setting)[token])))
        table[outcome] = (float(np.exp(sum(sampler))), policy, sampler)
    return table


def mean_total_variation(model, exit, prompts: list[list[int]], length: int) -> float:
    """Mean total variation between target and shallow drafter over every prefix that can occur, at temperature 1."""
    distances = []
    for prompt in prompts:
        rows = np.array([[*prompt, *tail] for tail in product(range(VOCAB), repeat=length)], np.int32)
        both = [np.asarray(x, np.float64)[:, len(prompt) - 1 :] for x in _logits(model, rows, exit)]
        p, q = (np.exp(x) / np.exp(x).sum(-1, keepdims=True) for x in both)
        distances.append(0.5 * np.abs(p - q).sum(-1).mean())
    return float(np.mean(distances))


@jax.jit
def _logits(model, rows, exit=None):
    tokens = jnp.asarray(rows)
    positions = jnp.broadcast_to(jnp.arange(rows.shape[1]), rows.shape)
    x_exit, x = hidden_states(model, tokens, jnp.ones_like(tokens), positions, dtype=jnp.float32)
    return logits(model, x), None if exit is None else exit_logits(model, exit, x_exit)


def p_value(samples: list[tuple[int, ...]], table: dict) -> float:
    """Chi-square of the samples against the exact distribution, rare outcomes pooled; 0 if an impossible one occurs."""
    counts: dict[tuple[int, ...], int] = {}
    for sample in samples:
        counts[sample] = counts.get(sample, 0) + 1
    if any(table.get(outcome, (0.0,))[0] <= 0 for outcome in counts):
        return 0.0
    expected = np.array([len(samples) * probability for probability, _, _ in table.values()])
    observed = np.array([counts.get(outcome, 0) for outcome in table])
    common = expected >= 5
    observed = np.append(observed[common], observed[~common].sum())
    expected = np.append(expected[common], expected[~common].sum())
    if expected[-1] < 1e-9:
        observed, expected = observed[:-1], expected[:-1]
    return (
        float(stats.chisquare(observed, expected * observed.sum() / expected.sum()).pvalue)
        if len(observed) > 1
        else 1.0
    )


def holm_rejects(p_values: list[float], level: float = 0.01) -> bool:
    """Whether Holm's procedure rejects any of the hypotheses: the smallest p-value against level / their number."""
    return min(p_values) < level / len(p_values)
