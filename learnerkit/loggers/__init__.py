"""Loggers write the numbers of a fit into files or to a tracker.

- logger.py: what they share: which numbers, when, on which rank, and how a run goes on;
- tables.py: files, CSV and JSON;
- trackers.py: TensorBoard, Weights & Biases, Comet, MLflow, Trackio;
- facts.py: what is known of the code and of the data.
"""
