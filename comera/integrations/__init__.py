"""Train and save compressed models by other libraries."""
