"""Benchmarks that anyone can run: ``comera bench --help``."""
