"""Train models: one step, the loop around it, checkpoints and logs."""
