"""Learn ranks: how large a model is, when its ranks shrink, and which are removed."""
