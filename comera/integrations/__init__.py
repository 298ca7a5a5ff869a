"""Training and saving of compressed models by other libraries."""
