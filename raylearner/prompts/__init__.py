"""Prompts from data sources."""

from raylearner.prompts.load import load_prompts

__all__ = ["load_prompts"]
