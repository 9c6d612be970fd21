"""Supervised training on demonstrations: `titan-rl sft`."""
