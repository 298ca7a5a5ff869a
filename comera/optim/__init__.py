"""Define optimizers and parameter groups; operate on the state of any optimizer."""
