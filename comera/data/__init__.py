"""Read public data formats, and make batches that depend only on a seed and a step."""
