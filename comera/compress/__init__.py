"""Compression of trained models by calibration data."""
