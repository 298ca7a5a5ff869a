"""Save and load chains of compressed training checkpoints, after ExCP (arXiv 2406.11257)."""
