"""Compressed models for inference: contracted once, or made of torch's layers alone."""
