"""Prompts from data sources."""

from raylearner.data.load import load_prompts

__all__ = ["load_prompts"]
