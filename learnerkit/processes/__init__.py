"""Processes that this one starts for a look at its own learner, rather than those of a run."""
