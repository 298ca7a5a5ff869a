"""Calibration: the speeds of this machine, and the fastest way of each operator on it."""
