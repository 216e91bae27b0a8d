"""Callbacks: each file is one subject; none imports another's file without need, none imports the learner."""
