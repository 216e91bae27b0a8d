"""The scaling of a fit: where a step's time goes, how large a batch is useful, and the rate that goes with it."""
