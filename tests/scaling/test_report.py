"""What a scaling report says."""

import pytest

from learnerkit import ScalingReport
from learnerkit.scaling.parts import Slowest


def made(**kwargs):
    facts = {
        "ranks": 2, "device": "cpu", "seconds": 0.1, "samples": 16.0, "walls": [0.1, 0.1], "slowest": None,
        "parts": {"forward": [0.01, 0.06], "exposed all-reduce": [0.09, 0.04]}, "waits": [0.05, 0.0],
        "communication": 0.04, "gradient_bytes": 4_000_000,
    }  # fmt: skip
    return ScalingReport(**facts | kwargs)


def test_the_report_says_in_words_what_it_found():
    slow, without = Slowest(1, "forward", 0.05, 0.05), {"network": 0.039, "both": 0.1}
    text = str(made(slowest=slow, alone=(0.06, 8.0), without=without))
    assert "2 are 1.20 times as fast (efficiency 60%)" in text
    assert "rank 1 is the slowest: the other waits for it, which costs 50 ms of each step (50%)" in text
    assert "its 'forward' takes 50 ms longer than elsewhere" in text
    assert "a free network would save 61%, both would save 0% of each step" in text
    assert "gradients travel for 40 ms of each step while all ranks wait (40%), 4 MB of them" in text
    assert "a step is too short" in str(made(alone=(0.05, 8.0)))
    assert "tried: num_workers=4 gives 25% more" in str(made(helps=[("num_workers=4", 0.25)], tried=["num_workers=4"]))
    assert "nothing that was tried helps by 5% or more (batches of 16)" in str(made(tried=["batches of 16"]))


def test_the_plot_has_a_bar_for_each_rank_and_part(plt):
    ax = made().plot()
    assert [t.get_text() for t in ax.get_legend().get_texts()] == [
        "forward", "waiting for a slower rank", "gradients on their way",
    ]  # fmt: skip
    assert [p.get_width() for p in ax.patches] == pytest.approx([10, 60, 50, 0, 40, 40])
