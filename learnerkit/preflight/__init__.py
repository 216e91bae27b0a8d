"""Checks before a long run: of one step, of several ranks against one process, and of the machines."""
