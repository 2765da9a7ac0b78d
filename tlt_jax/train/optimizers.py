"""Optimisers and schedules, all optax's, behind one rate that follows the phase's progress.

An optimiser here is built with rate 1; the update step multiplies its result by `learning_rate(config, progress)`. So
a budget in seconds, tokens or steps drives the schedule alike, and its position is the progress that is resumed.
"""

from collections.abc import Callable

import jax
import optax

from tlt_jax.config.stage_sections import OptimizerConfig
from tlt_jax.models.declare import ParamSpec, flatten, unflatten

Specs = dict[str, ParamSpec]


def make_optimizer(config: OptimizerConfig, specs: Specs) -> optax.GradientTransformation:
    """Clipping by global norm, then the named optimiser, for the module whose declarations are `specs`."""
    return optax.chain(optax.clip_by_global_norm(config.clip_norm), OPTIMIZERS[config.name](config, specs))


def learning_rate(config: OptimizerConfig, progress: jax.Array | float) -> jax.Array:
    """The rate at `progress` in [0, 1]: linear warm-up over `warmup_fraction`, then the decay to `final_fraction`."""
    peak, end, warmup = config.learning_rate, config.learning_rate * config.final_fraction, config.warmup_fraction
    rest = max(1.0 - warmup, 1e-6)
    if config.decay == "cosine":
        fall = optax.cosine_decay_schedule(peak, rest, alpha=config.final_fraction)
    elif config.decay == "linear":
        fall = optax.linear_schedule(peak, end, rest)
    else:
        length = max(min(config.decay_fraction, rest), 1e-6)
        fall = optax.linear_schedule(peak, end, length, transition_begin=rest - length)
    if warmup == 0:
        return fall(progress)
    return optax.join_schedules([optax.linear_schedule(0.0, peak, warmup), fall], [warmup])(progress)


def _adamw(config: OptimizerConfig, specs: Specs) -> optax.GradientTransformation:
    return optax.adamw(1.0, config.beta1, config.beta2, weight_decay=config.weight_decay, mask=_matrices(specs))


def _lion(config: OptimizerConfig, specs: Specs) -> optax.GradientTransformation:
    return optax.lion(1.0, config.beta1, config.beta2, weight_decay=config.weight_decay, mask=_matrices(specs))


def _muon(config: OptimizerConfig, specs: Specs) -> optax.GradientTransformation:
    """Muon (Jordan et al. 2024) on the layers' matrices, Adam with Nesterov momentum on all else."""
    adam_rate = config.adam_learning_rate or config.learning_rate

    def dimensions(params):
        return unflatten(params, {path: _muon_dimensions(specs[path]) for path in flatten(params)})

    muon = optax.contrib.muon(
        1.0,
        adam_b1=config.beta1,
        adam_b2=config.beta2,
        adam_learning_rate=adam_rate / config.learning_rate,
        muon_weight_dimension_numbers=dimensions,
    )
    # What leaves muon is the step itself, so decay enters with a minus sign.
    return optax.chain(muon, optax.add_decayed_weights(-config.weight_decay, _matrices(specs)))


def _muon_dimensions(spec: ParamSpec) -> optax.contrib.MuonDimensionNumbers | None:
    """Which axes of a layer's array are its matrix's input and output; None for what is not such a matrix."""
    axes = list(enumerate(spec.axes))[1 if spec.stacked else 0 :]
    if "vocab" in spec.axes or len(axes) < 2:
        return None
    positions = [i for i, _ in axes]
    reduction, output = (positions[:1], positions[1:]) if axes[0][1] == "embed" else (positions[:-1], positions[-1:])
    return optax.contrib.MuonDimensionNumbers(tuple(reduction), tuple(output))


def _matrices(specs: Specs) -> Callable:
    """The mask of weight decay: True for matrices, False for norms and biases."""

    def mask(params):
        return unflatten(params, {path: specs[path].is_matrix for path in flatten(params)})

    return mask


OPTIMIZERS: dict[str, Callable[[OptimizerConfig, Specs], optax.GradientTransformation]] = {
    "adamw": _adamw,
    "lion": _lion,
    "muon": _muon,
}
