"""The KL penalty's coefficient."""

from tlt_jax.config.schema import PPOConfig


def next_kl_coef(config: PPOConfig, coef: float, kl: float, sequences: int) -> float:
    """The coefficient after a step whose KL was `kl` nats a sequence.

    fixed: unchanged. adaptive: coef * (1 + clip(kl / target - 1, -0.2, 0.2) * sequences / horizon), the proportional
    controller of Ziegler et al. 2019, section 2.2.
    """
    if config.kl_controller == "fixed":
        return coef
    error = min(max(kl / config.kl_target - 1.0, -0.2), 0.2)
    return coef * (1.0 + error * sequences / config.kl_horizon)
