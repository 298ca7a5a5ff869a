"""Trained models made smaller by what their data say of each layer."""
