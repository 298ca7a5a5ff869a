"""Define drop-in modules whose weights are tensor trains, and convert models to them."""
