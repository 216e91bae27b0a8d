"""Looking inside: a summary of the model, hooks and statistics of activations, what a classifier gets wrong."""
