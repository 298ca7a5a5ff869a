"""Small models in plain torch, made of layers that ``tensorize_`` can replace."""
