"""Processes: start the ranks of one machine or of several, watch them, stop them. The standard library only."""
