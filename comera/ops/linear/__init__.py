"""Operators of linear layers: products with factors or weights, feed-forward, eight bits."""
