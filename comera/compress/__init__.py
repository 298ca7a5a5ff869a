"""Compress trained models with the help of calibration data."""
