"""Compressed models that are run and not trained: contracted once, and in layers of torch alone."""
