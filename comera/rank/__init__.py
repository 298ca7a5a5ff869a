"""The learning of ranks: how large a model is, when its ranks shrink, how they are removed."""
