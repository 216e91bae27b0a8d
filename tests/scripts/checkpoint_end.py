"""Ends while a checkpoint is written in the background: checkpoint_end.py FOLDER."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from checkpoint_files import save

from learnerkit.checkpoints.storage import Storage

save(Storage(Path(sys.argv[1]), background=True), 1, size=3_000_000)
