"""Define the tasks that a run can train: text and click logs."""
