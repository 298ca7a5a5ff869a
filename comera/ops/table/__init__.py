"""Operators of embedding tables: rows and bags read from factors or from slices of cores."""
