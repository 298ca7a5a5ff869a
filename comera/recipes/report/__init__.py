"""Write HTML pages of runs and sweeps: gather their content, and fill templates."""
