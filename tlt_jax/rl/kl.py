"""The KL penalty in the reward, and its coefficient.

Shape suffixes: B sequences, T positions.
"""

import numpy as np

from tlt_jax.config.stage_sections import PPOConfig


def next_kl_coef(config: PPOConfig, coef: float, kl: float, sequences: int) -> float:
    """The coefficient after a step whose KL was `kl` nats a sequence.

    fixed: unchanged. adaptive: coef * (1 + clip(kl / target - 1, -0.2, 0.2) * sequences / horizon), the proportional
    controller of Ziegler et al. 2019, section 2.2.
    """
    if config.kl_controller == "fixed":
        return coef
    error = min(max(kl / config.kl_target - 1.0, -0.2), 0.2)
    return coef * (1.0 + error * sequences / config.kl_horizon)


def penalised_rewards(
    scores_B: np.ndarray,
    policy_logp_BT: np.ndarray,
    ref_logp_BT: np.ndarray,
    mask_BT: np.ndarray,
    length_B: np.ndarray,
    coef: float,
) -> np.ndarray:
    """Rewards [B, T] of each token: -coef * (log p - log p_ref), the k1 estimate of the KL, on the completion's tokens,
    and the sequence's score on the last of its `length` tokens (Ziegler et al. 2019).
    """
    rewards_BT = (-coef * (policy_logp_BT - ref_logp_BT) * mask_BT).astype(np.float32)
    rewards_BT[np.arange(len(scores_B)), length_B - 1] += scores_B
    return rewards_BT


def sequence_scores(model_B: np.ndarray, quality_B: np.ndarray, ended_B: np.ndarray, config: PPOConfig) -> np.ndarray:
    """What PPO makes larger, [B]: the reward model's score + quality_coef * quality, or `truncated_reward` for a
    completion that did not end."""
    return np.where(ended_B, model_B + config.quality_coef * quality_B, config.truncated_reward).astype(np.float32)
