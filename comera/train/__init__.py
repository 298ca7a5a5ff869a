"""Training: one step, the loop around it, its checkpoints and logs."""
