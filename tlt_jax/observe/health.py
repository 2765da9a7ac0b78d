"""Hints on what holds a run back. Each rule is a function of figures: what to say, or None where all is well."""

import math
from collections.abc import Sequence
from itertools import pairwise
from statistics import median

INPUT, MEMORY, LOSS, COMPILING = "input-bound", "memory-bound", "loss not falling", "recompiling"

SETTLED = 10  # first steps of a phase, that compile and fill buffers, are not judged
INPUT_STEPS, INPUT_SHARE = 20, 0.2
MEMORY_SHARE = 0.9
LOSS_STEPS = 60  # the fewest steps of a phase that its loss is judged by
LOSS_FALL = 0.005  # of the loss, over the second half of the phase's steps
COMPILED_STEPS = 3


def input_bound(waits: Sequence[float]) -> str | None:
    """From the steps' `train/data_wait_fraction`, the first `SETTLED` left out: whether the mean of the last
    `INPUT_STEPS` is above `INPUT_SHARE`."""
    if len(waits) < INPUT_STEPS:
        return None
    share = sum(waits[-INPUT_STEPS:]) / INPUT_STEPS
    if share <= INPUT_SHARE:
        return None
    return (
        f"the devices waited for data in {100 * share:.0f} % of the time of {INPUT_STEPS} steps; more `data.workers`"
        " or a larger `data.prefetch_factor` read further ahead, if there are cores for it"
    )


def memory_bound(needed: float, limit: float, largest: Sequence[tuple[str, float]]) -> str | None:
    """From bytes needed and allowed on a device: whether they are above `MEMORY_SHARE`. `largest` are the largest
    buffers by name, in bytes."""
    if needed <= MEMORY_SHARE * limit:
        return None
    buffers = ", ".join(f"{name} {size / 2**20:,.1f} MiB" for name, size in largest)
    return (
        f"{needed / 2**20:,.0f} of {limit / 2**20:,.0f} MiB of a device are needed; the largest buffers: {buffers};"
        " a smaller batch, more accumulation or `model.remat` need less"
    )


def loss_not_falling(losses: Sequence[float]) -> str | None:
    """From the losses of a phase's steps so far: whether it is clear that over their second half the loss has fallen
    by less than `LOSS_FALL` of itself.

    The fall is from the median of the half's first third to that of its last. It is clear if that, and three times its
    standard error on top, is still less. The noise of a step is taken from successive differences, which a trend
    hardly changes; so a noisy loss needs more steps to be judged, and a long phase is judged over a long way.
    """
    sound = [loss for loss in losses[len(losses) // 2 :] if math.isfinite(loss)]
    third = len(sound) // 3
    if len(losses) < LOSS_STEPS or third < 2:
        return None
    first, last = median(sound[:third]), median(sound[-third:])
    steps = [abs(after - before) for before, after in pairwise(sound)]
    noise = median(steps) / (0.6745 * math.sqrt(2.0))  # of normal noise, its standard deviation
    error = 1.2533 * noise * math.sqrt(2.0 / third)  # a median's is 1.2533 times a mean's
    if first - last + 3.0 * error >= LOSS_FALL * abs(first):
        return None
    return (
        f"{first:.4g} to {last:.4g} over the last {len(losses) - len(losses) // 2} steps; a larger `learning_rate`,"
        " or a look at the data"
    )


def recompiling(compiled: Sequence[tuple[int, float]]) -> str | None:
    """From (step of the run, seconds) of the steps that compiled something, a phase's first `SETTLED` left out:
    whether there are `COMPILED_STEPS` or more."""
    if len(compiled) < COMPILED_STEPS:
        return None
    steps, seconds = ", ".join(str(step) for step, _ in compiled), sum(seconds for _, seconds in compiled)
    return (
        f"steps {steps} compiled anew, for {seconds:.1f} s in all, though the phase had settled: arrays of ever new"
        " shapes are the usual reason"
    )
