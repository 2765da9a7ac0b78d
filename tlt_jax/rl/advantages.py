"""Advantages. Pure maths on host arrays, float32.

Shape suffixes: B sequences, T positions, N prompts, C completions a prompt.
"""

import numpy as np


def group_advantages(rewards_B: np.ndarray, group_size: int, by_std: bool) -> tuple[np.ndarray, int]:
    """(advantages_B, groups with equal rewards): (r - mean of the group) / std of the group.

    Group-relative baseline of GRPO (Shao et al. 2024); without the division it is Dr. GRPO's (Liu et al. 2025). A
    group's sequences lie next to each other. Equal rewards give advantages 0. Raises ValueError for a group of one,
    whose baseline would be its own reward.
    """
    if group_size < 2:
        raise ValueError(f"group_size is {group_size}; a group baseline needs at least 2")
    rewards_NC = rewards_B.reshape(-1, group_size).astype(np.float64)
    centred_NC = rewards_NC - rewards_NC.mean(axis=1, keepdims=True)
    std_N1 = rewards_NC.std(axis=1, keepdims=True)
    equal_N1 = np.ptp(rewards_NC, axis=1, keepdims=True) < 1e-9
    scale_N1 = np.where(equal_N1, 1.0, std_N1) if by_std else 1.0
    advantages_NC = np.where(equal_N1, 0.0, centred_NC / scale_N1)
    return advantages_NC.reshape(-1).astype(np.float32), int(equal_N1.sum())


def gae(
    rewards_BT: np.ndarray, values_BT: np.ndarray, mask_BT: np.ndarray, gamma: float, lam: float
) -> tuple[np.ndarray, np.ndarray]:
    """(advantages, returns), each [B, T] and 0 outside the mask.

    Generalised advantage estimation (Schulman et al. 2016): delta_t = r_t + gamma V_{t+1} - V_t and
    A_t = delta_t + gamma lambda A_{t+1}, over the tokens of the mask, one contiguous stretch a row. values_t is the
    value of the state in which token t is chosen; after the last token the value is 0. returns = A + V.
    """
    advantages_BT = np.zeros_like(rewards_BT, dtype=np.float32)
    running_B = np.zeros(len(rewards_BT), np.float32)
    next_value_B = np.zeros(len(rewards_BT), np.float32)
    for t in range(rewards_BT.shape[1] - 1, -1, -1):
        inside_B = mask_BT[:, t] > 0
        delta_B = rewards_BT[:, t] + gamma * next_value_B - values_BT[:, t]
        running_B = np.where(inside_B, delta_B + gamma * lam * running_B, 0.0)
        next_value_B = np.where(inside_B, values_BT[:, t], 0.0)
        advantages_BT[:, t] = running_B
    return advantages_BT, np.where(mask_BT > 0, advantages_BT + values_BT, 0.0).astype(np.float32)


def whiten(x: np.ndarray, mask: np.ndarray, keep_mean: bool = False) -> np.ndarray:
    """Scales to standard deviation 1, and to mean 0 unless `keep_mean`, over the mask alone; 0 outside it.

    A single valid entry, or entries that are all equal, give 0 (or the mean).
    """
    inside = mask > 0
    if not inside.any():
        return np.zeros_like(x)
    mean, std = x[inside].mean(), x[inside].std()
    scaled = np.zeros_like(x) if std < 1e-8 else (x - mean) / std
    return np.where(inside, scaled + (mean if keep_mean else 0.0), 0.0).astype(x.dtype)


def token_weights(mask_BT: np.ndarray, aggregation: str) -> np.ndarray:
    """Weights [B, T] of each token in the loss.

    token_mean (default): every token of the update weighs the same, so that long answers are not favoured or spared.
    sequence_mean: every sequence weighs the same, its tokens 1 / length: a long wrong answer is punished less a token.
    """
    if aggregation == "token_mean":
        return mask_BT.astype(np.float32)
    return (mask_BT / np.maximum(mask_BT.sum(axis=1, keepdims=True), 1.0)).astype(np.float32)
