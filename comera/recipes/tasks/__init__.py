"""The kinds of tasks a recipe can train, one file each."""
