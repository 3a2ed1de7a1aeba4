"""Asynchronous reinforcement learning for LLM agents on Ray: rollout actors, replay, learner, weight push."""

__version__ = "0.1.0"
