"""Run a program of fastai whose joined schedules, such as 1cycle's, are computed in float64 rather than in float32."""

import runpy
import sys
from bisect import bisect_right
from itertools import accumulate

from fastai.callback import schedule


def combine_scheds(pcts, scheds):
    """Schedules one after the other, as fastai's function of this name joins them."""
    bounds = list(accumulate(pcts, initial=0.0))

    def at(pos):
        i = min(bisect_right(bounds, pos), len(scheds)) - 1
        return scheds[i]((pos - bounds[i]) / (bounds[i + 1] - bounds[i]))

    return at


schedule.combine_scheds = combine_scheds
runpy.run_path(sys.argv[1], run_name="__main__")
