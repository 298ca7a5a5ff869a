"""Make tables and plots of a model's size, predicted cost, memory and measured losses."""
