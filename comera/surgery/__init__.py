"""Change a model and its optimizer during training; parameters stay the same objects."""
