"""Looking inside: a summary of the model, its layers in order, hooks, statistics, what a classifier gets wrong."""
