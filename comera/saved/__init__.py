"""A folder that holds a model: its weights, and what they are the weights of."""
