"""Benchmarks: ``python -m benchmarks --help``, from the root of the repository."""
