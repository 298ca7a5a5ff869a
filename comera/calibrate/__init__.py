"""Measure the speeds of this machine, and the fastest implementation of each operator on it."""
