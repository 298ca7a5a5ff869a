"""What linear layers run: two factors or the weight formed from them, and layers in one go."""
