"""Pages that a run or a sweep leaves: one HTML file, tables, pictures."""
