"""Readers of public formats and batches that depend on nothing but a seed and a step."""
