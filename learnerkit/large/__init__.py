"""The support of models too large for one process: their units, and parameters that are mapped from files."""
