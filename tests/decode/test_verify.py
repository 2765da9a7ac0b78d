"""The verification rules by themselves: what comes out, exactly, over all drafts and all noise; the papers' figures."""

from functools import partial
from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tlt_jax.decode import verify
from tlt_jax.decode.verify import verify_block, verify_coupled, verify_lenient, verify_token

V, G = 3, 2
DRAFTS = list(product(range(V), repeat=G))
NEAR_1 = np.float32(1 - 2**-20)
POINTS = (np.arange(4000) + 0.5) / 4000


class Trees:
    """Distributions of target and drafter after every sequence of up to G tokens; `certain`: the drafter's are
    one-hot."""

    def __init__(self, seed: int, certain: bool = False):
        random = np.random.default_rng(seed)
        prefixes = [prefix for length in range(G + 1) for prefix in product(range(V), repeat=length)]
        self.p = {prefix: self._some(random) for prefix in prefixes}
        self.q = {prefix: np.eye(V)[random.integers(V)] if certain else self._some(random) for prefix in prefixes}
        self.certain = certain

    @staticmethod
    def _some(random) -> np.ndarray:
        weights = random.exponential(size=V) ** 2
        return weights / weights.sum()

    def rows(self, table) -> np.ndarray:
        """[drafts, G + 1, V]: the distributions along each sequence of drafts."""
        return np.array([[table[drafts[:i]] for i in range(G + 1)] for drafts in DRAFTS], np.float32)

    def drafts_probability(self, drafts, count: int) -> float:
        return float(np.prod([self.q[drafts[:i]][drafts[i]] for i in range(count)]))


def answers(compiled, trees: Trees, row: int, uniform: np.ndarray, drafted: int):
    """(accepted, next) of the drafts `row` for each row of noise."""
    count = len(uniform)
    p = jnp.broadcast_to(trees.rows(trees.p)[row], (count, G + 1, V))
    q = None if trees.certain else jnp.broadcast_to(trees.rows(trees.q)[row, :G], (count, G, V))
    drafts = jnp.broadcast_to(jnp.asarray(DRAFTS[row], jnp.int32), (count, G))
    found = compiled(p, drafts, q, jnp.full(count, drafted), jnp.asarray(uniform, jnp.float32))
    return np.asarray(found[0]), np.asarray(found[1])


def chances(rule, compiled, trees: Trees, row: int, drafted: int) -> np.ndarray:
    """[G + 1]: how likely 0, 1, ... drafts stand: from the thresholds of each uniform, found by bisection, and the
    order in which the rule asks."""
    low, high = np.zeros(G), np.ones(G)
    for _ in range(24):
        middle = (low + high) / 2
        uniform = np.full((G, G + 1), NEAR_1)
        uniform[np.arange(G), np.arange(G)] = middle
        if rule is not verify_block:  # which asks for the first that falls; `block` for the last that stands
            uniform[np.tril_indices(G, -1)] = 0.0
        stands = answers(compiled, trees, row, uniform, drafted)[0] > np.arange(G)
        low, high = np.where(stands, middle, low), np.where(stands, high, middle)
    if rule is verify_block:
        falls_after = np.append(np.cumprod((1 - low)[::-1])[::-1][1:], 1.0)
        stands = low * falls_after
        return np.array([1 - stands.sum(), *stands])
    stands = np.cumprod(low)
    return np.array([1.0, *stands]) - np.array([*stands, 0.0])


def joint(rule, trees: Trees, drafted: int) -> tuple[dict, float]:
    """({sequence of G + 1 tokens: probability} when what follows the block is the target's, expected drafts kept)."""
    found: dict[tuple, float] = {}
    kept, compiled = 0.0, jax.jit(lambda *given: rule(*given))  # a function of its own, which JAX has not seen yet
    for row, drafts in enumerate(DRAFTS):
        weight = trees.drafts_probability(drafts, G)
        if not weight:
            continue
        for accepted, chance in enumerate(chances(rule, compiled, trees, row, drafted)):
            if weight * chance < 1e-7:
                continue
            kept += weight * chance * accepted
            uniform = np.full((len(POINTS), G + 1), NEAR_1)
            uniform[:, :accepted], uniform[:, -1] = 0.0, POINTS
            counts, nexts = answers(compiled, trees, row, uniform, drafted)
            assert np.all(counts == accepted)
            for token, share in enumerate(np.bincount(nexts, minlength=V) / len(POINTS)):
                start = (*drafts[:accepted], token)
                for tail in product(range(V), repeat=G + 1 - len(start)):
                    sequence = start + tail
                    rest = np.prod([trees.p[sequence[:i]][sequence[i]] for i in range(len(start), G + 1)])
                    found[sequence] = found.get(sequence, 0.0) + weight * chance * share * float(rest)
    return found, kept


def error(trees: Trees, found: dict) -> float:
    every = product(range(V), repeat=G + 1)
    return max(abs(found.get(s, 0.0) - float(np.prod([trees.p[s[:i]][s[i]] for i in range(G + 1)]))) for s in every)


@pytest.mark.parametrize("drafted", [1, 2])
@pytest.mark.parametrize("certain", [False, True])
@pytest.mark.parametrize("seed", [2, 4])
def test_what_comes_out_is_the_targets_and_block_keeps_no_fewer(seed, certain, drafted):
    trees = Trees(seed, certain)
    (by_token, kept_by_token), (by_block, kept_by_block) = (
        joint(rule, trees, drafted) for rule in (verify_token, verify_block)
    )
    assert error(trees, by_token) < 5e-4
    assert error(trees, by_block) < 5e-4
    assert kept_by_block > kept_by_token - 1e-5


def test_a_block_that_forgets_what_its_drafts_cost_is_caught(monkeypatch):
    right = verify._residual
    monkeypatch.setattr(verify, "_residual", lambda *given: right(*given[:-1], jnp.ones_like(given[-1])))
    assert error(Trees(4), joint(verify_block, Trees(4), G)[0]) > 0.02


def test_the_papers_example():
    """Sun et al. 2024, section 2: p = (1/3, 2/3), q = (2/3, 1/3) at each of two drafts: 10/9 drafts are kept token by
    token, 11/9 by block."""
    trees = Trees(0)
    trees.p = dict.fromkeys(trees.p, np.array([1 / 3, 2 / 3, 0.0]))
    trees.q = dict.fromkeys(trees.q, np.array([2 / 3, 1 / 3, 0.0]))
    assert joint(verify_token, trees, G)[1] == pytest.approx(10 / 9, abs=1e-4)
    assert joint(verify_block, trees, G)[1] == pytest.approx(11 / 9, abs=1e-4)


@pytest.mark.parametrize("rule", [verify_token, verify_block])
def test_a_drafter_that_is_the_target_is_always_right(rule):
    trees = Trees(5)
    trees.q = trees.p
    for row in range(len(DRAFTS)):
        assert np.all(answers(jax.jit(rule), trees, row, np.full((1, G + 1), NEAR_1), G)[0] == G)


def test_coupled_drafts_stand_as_often_as_the_bound_says_and_the_token_is_the_targets_own():
    trees, count = Trees(2), 20_000
    p, q = trees.p[()], trees.q[()]
    gumbel = jax.random.gumbel(jax.random.key(0), (count, 2, V))
    drafts = jnp.argmax(jnp.log(q) + gumbel[:, :1], axis=-1)
    rows = jnp.broadcast_to(jnp.asarray(trees.rows(trees.p)[0, :2]), (count, 2, V))
    accepted, _, _ = verify_coupled(rows, drafts, None, jnp.ones(count, int), gumbel)
    distance = 0.5 * np.abs(p - q).sum()
    assert (1 - distance) / (1 + distance) - 0.02 < accepted.mean() <= 1 - distance + 0.02
    first = np.where(accepted == 1, drafts[:, 0], verify_coupled(rows, drafts, None, jnp.zeros(count, int), gumbel)[1])
    own = np.asarray(jnp.argmax(jnp.log(rows[:, 0]) + gumbel[:, 0], axis=-1))
    np.testing.assert_array_equal(first, own)


LENIENT = [(0.6, False), (0.8, False), (0.6, True), (1.0, False)]


@pytest.mark.parametrize("certain", [False, True])
@pytest.mark.parametrize(("threshold", "by_entropy"), LENIENT)
def test_a_lenient_rule_says_what_it_drew_from(threshold, by_entropy, certain):
    rule = partial(verify_lenient, threshold=threshold, by_entropy=by_entropy)
    trees = Trees(2, certain)
    first = np.zeros(V)
    for sequence, probability in joint(rule, trees, G)[0].items():
        first[sequence[0]] += probability
    q = None if certain else trees.rows(trees.q)[:, :G]
    args = trees.rows(trees.p), jnp.asarray(DRAFTS, jnp.int32), q, jnp.full(len(DRAFTS), G), np.ones((len(DRAFTS), 3))
    row = next(i for i, drafts in enumerate(DRAFTS) if trees.drafts_probability(drafts, G))
    generated = np.asarray(rule(*args)[2])
    np.testing.assert_allclose(generated[row, 0], first, atol=5e-4)
    np.testing.assert_allclose(generated.sum(-1), 1.0, atol=1e-5)
    np.testing.assert_allclose(generated[row, G], trees.p[DRAFTS[row]], atol=1e-6)  # the bonus token is the target's
    lossless = np.abs(first - trees.p[()]).max() < 5e-4
    assert lossless == (threshold == 1.0)


def test_the_threshold_tightens_with_entropy():
    """At an even target it is 1, and the rule lossless; at one that is sure it is as given: 0.5 / (0.6 * 0.8) > 1."""
    even, sure = np.full(V, 1 / V), np.array([0.5, 0.5, 0.0])
    q = np.array([0.8, 0.1, 0.1])
    for p, by_entropy, stands in ((sure, False, True), (even, False, False), (even, True, False)):
        found = verify_lenient(
            jnp.asarray([[p, p]]), jnp.zeros((1, 1), int), jnp.asarray([[q]]), jnp.ones(1, int),
            jnp.asarray([[0.99, 0.5]]), 0.6, by_entropy,
        )  # fmt: skip
        assert bool(found[0][0]) == stands
    entropy = -2 * 0.5 * np.log(0.5) / np.log(V)
    threshold = 0.6 + 0.4 * entropy
    chance = 0.5 / (threshold * 0.8)
    for uniform, stands in ((chance - 0.01, 1), (chance + 0.01, 0)):
        found = verify_lenient(
            jnp.asarray([[sure, sure]]), jnp.zeros((1, 1), int), jnp.asarray([[q]]), jnp.ones(1, int),
            jnp.asarray([[uniform, 0.5]]), 0.6, True,
        )  # fmt: skip
        assert found[0][0] == stands
