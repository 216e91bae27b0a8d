"""Checkpoints of a whole run: their files, what is in them, and the callback that writes and reads them."""
