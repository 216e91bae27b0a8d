"""The launcher, ``python -m learnerkit.launch``: it starts the ranks of one machine or of several, and watches them.

It imports the standard library only, and torch just to find other machines. The files, in the order of a launch:

- cli.py reads the command line and makes the attempts, or has jobs.py write a job file from a template. gpus.py counts
  GPUs. Where this launcher is one of several, learnerkit.clusters says so.
- nodes.py begins an attempt with the launchers of other machines, and agrees with them on its end. rendezvous.py finds
  them (addresses.py), and node_info.py checks that they match.
- supervise.py starts, watches and stops the ranks of this machine, and environment.py sets their variables. The program
  of each rank is processes/rank_main.py.
- report.py says in words which rank failed first. events.py writes for other programs what happens.
"""
