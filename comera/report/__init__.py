"""Tables and plots: what a model weighs, how a run went."""
