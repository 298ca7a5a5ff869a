"""HTML pages of runs and sweeps: what is gathered for them, and the templates that show it."""
