"""Train runs that a typed YAML file describes, and define the command line."""
