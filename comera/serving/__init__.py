"""Prepare compressed models for inference: contract them once, or use only torch's layers."""
