"""Drop-in modules whose weights are tensor trains, and the conversion of models to them."""
