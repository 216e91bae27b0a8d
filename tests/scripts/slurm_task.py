"""Print what `learnerkit.clusters.slurm` makes of the environment of this process."""

import json
import os

from learnerkit.clusters.slurm import advice, current_task, expand_nodes

try:
    task = current_task(os.environ)
    told = task and (task.node, task.nodes, task.is_rank, task.address, task.port)
except ValueError as error:
    told = str(error)
nodes = expand_nodes(os.environ["SLURM_JOB_NODELIST"])
print(json.dumps([told, advice(os.environ), nodes]), flush=True)
