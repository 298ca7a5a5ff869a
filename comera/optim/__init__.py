"""Optimizer companions. Nothing here knows that tensor trains exist."""
