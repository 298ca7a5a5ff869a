"""Change a model and its optimizer in place during training; parameters stay the same."""
