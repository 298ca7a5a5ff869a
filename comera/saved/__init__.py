"""Save models in folders, and load them."""
