"""Clusters: what the variables of a scheduler say about this process, and about the others of its run.

`find` asks every function of the table in table.py. place.py has the answer of such a function, slurm.py reads the
variables of SLURM, and check.py compares the answer with the GPUs of the machine and with `RANK` and `WORLD_SIZE`. The
launcher asks where it is one of several launchers, and `learnerkit.distributed` where the scheduler has started the
script itself. The guide clusters.md says how to add a cluster.
"""

from learnerkit.clusters.check import check_launcher, check_script
from learnerkit.clusters.place import Place
from learnerkit.clusters.table import CLUSTERS, advice, find

__all__ = ["CLUSTERS", "Place", "advice", "check_launcher", "check_script", "find"]
