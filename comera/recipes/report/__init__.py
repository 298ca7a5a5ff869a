"""HTML pages of runs and sweeps: their content, and the templates that show it."""
