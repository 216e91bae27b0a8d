"""Single processes: how they start and end, what they know of the machine, and processes that act as ranks for a look.

- rank_main.py is the program of each rank that a launcher starts: it runs the script, and knows how processes end. It
  imports no module of this package, and neither does guard.py, which ends what the ranks have started if the launcher
  is killed.
- heartbeat.py tells where in a run a rank is. sockets.py looks at the connections of this process, and asks whether
  torch's store answers at an address. requests.py holds what signals ask of a run. machine.py knows the machine.
  event_file.py appends lines to the file by which other programs follow a launch.
- forks.py makes forks of this process that act as ranks, for a look at its own learner before a run.

All but forks.py need the standard library alone, as the launcher does.
"""
