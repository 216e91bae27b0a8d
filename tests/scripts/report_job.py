"""A script that trains, for `python -m learnerkit.launch --report`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from scaling_jobs import make_learner

learn = make_learner("dataset")
with learn.distrib_ctx():
    learn.fit_one_cycle(1)
print("trained")
