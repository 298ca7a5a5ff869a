"""What a layer costs, before it runs. Nothing here imports torch."""
