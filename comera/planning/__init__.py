"""Predict what a layer costs, and choose the best way to compute it. Imports no torch.

The ways to compute a layer (``ways``) are lists of steps (``candidate``),
timed on a ``machine`` and ranked by the ``planner``.
"""
