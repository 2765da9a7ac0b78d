"""Reinforcement learning: advantages, losses, KL, rewards, and the reward model's objective."""
