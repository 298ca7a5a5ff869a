"""Models saved in folders and loaded from them."""
