"""Runs described by one typed YAML file, and the command line."""
