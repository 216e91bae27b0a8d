"""How a fit scales: where a step's time goes, what the batch is worth, and the rate that goes with it."""
