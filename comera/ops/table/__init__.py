"""What embedding tables run: rows and bags read from factors or from slices of cores."""
