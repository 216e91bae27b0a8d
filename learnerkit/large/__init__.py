"""What a model needs that is too large for one process: its units, and parameters whose memory is that of files."""
