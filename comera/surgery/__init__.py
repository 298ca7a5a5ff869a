"""A model and its optimizer changed in place while training goes on; parameters stay the same."""
