"""The forecast: exact arithmetic on made-up links, what must hold for any link, and its words."""

import itertools
import json
import math

import pytest

from learnerkit.scaling.forecast import forecast
from learnerkit.scaling.links import Link, all_reduce_seconds, fitted

LINK = Link(1.0, 10.0)  # a second, ten bytes a second
SLOW, FAST = Link(1e-3, 1e8), Link(5e-6, 1e11)


def steps(*args, **kwargs):
    return {row.ranks: row.step for row in forecast(*args, **kwargs).rows}


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"ranks": 1}, 0),
        ({"ranks": 2}, 2 * 1 + 2 / 2 * 20 / 10),
        ({"ranks": 4}, 2 * 3 + 2 * 3 / 4 * 20 / 10),
        ({"ranks": 2, "topology": "tree"}, 2 * 1 + 2 / 2 * 20 / 10),
        ({"ranks": 8, "topology": "tree"}, 2 * 3 + 2 * 20 / 10),
        ({"ranks": 5, "topology": "tree"}, 2 * 3 + 2 * 20 / 10),
        # Two machines of four: 4 of 14 messages go between them, and all bytes pass the slower link.
        ({"ranks": 8, "machines": 2, "inter": Link(100, 2)}, 4 * 100 + 10 * 1 + 2 * 7 / 8 * 20 / 2),
        ({"ranks": 8, "machines": 2, "inter": Link(100, 2), "topology": "tree"}, 2 * 100 + 4 * 1 + 2 * 20 / 2),
        # A rank on each machine: the link on a machine is not used.
        ({"ranks": 2, "machines": 2, "inter": Link(100, 20)}, 2 * 100 + 20 / 20),
        ({"ranks": 4, "machines": 4, "inter": Link(100, 20)}, 6 * 100 + 2 * 3 / 4 * 20 / 20),
        ({"ranks": 4, "machines": 2}, 2 * 3 + 2 * 3 / 4 * 20 / 10),
    ],
)
def test_the_time_of_an_all_reduce_follows_the_model(options, expected):
    assert all_reduce_seconds(20, link=LINK, **options) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("ranks", [2, 3, 16])
def test_a_link_is_found_from_times_that_follow_the_model(ranks):
    sizes = [1 << 10, 1 << 17, 1 << 24]
    seconds = [all_reduce_seconds(size, ranks, Link(2e-5, 3e9)) for size in sizes]
    assert fitted(sizes, seconds, ranks) == pytest.approx((2e-5, 3e9, 0), rel=1e-9, abs=1e-9)


def test_a_fit_is_never_negative_and_says_how_good_it_is():
    fast = fitted([1000, 2000], [1.0, 3.0], 2)  # on a line that is below 0 at no bytes
    assert (fast.latency, fast.bandwidth > 0) == (0, True)
    assert fast.error == pytest.approx(3 / 13)  # the best line through 0 has 2.3 s for 2000 bytes
    same = fitted([1000, 2000], [3.0, 1.0], 2)  # larger is quicker
    assert same.bandwidth == math.inf
    assert 0 < same.latency < 1.5
    off = fitted([0, 1000, 2000], [1.0, 2.5, 3.0], 2)
    assert 0.05 < off.error < 0.2
    assert off == pytest.approx(fitted([2000, 0, 1000], [3.0, 1.0, 2.5], 2))


@pytest.mark.parametrize(
    "wrong", [([8, 8], [1, 1], 2), ([8], [1], 2), ([8, 9], [1], 2), ([8, 9], [0, 1], 2), ([8, 9], [1, 2], 1)]
)
def test_a_fit_without_enough_to_go_by_is_refused(wrong):
    with pytest.raises(ValueError, match="two different sizes and two ranks at least"):
        fitted(*wrong)


def test_a_step_is_what_is_computed_and_what_is_not_hidden():
    assert steps(5, 20, LINK, ranks=(1, 2)) == {1: 5, 2: 5 + 4}
    assert steps(5, [20, 10], LINK, ranks=[2]) == {1: 5, 2: 5 + 4 + 3}
    assert steps(5, [20, 10], LINK, ranks=[2], hidden=3) == {1: 5, 2: 5 + 4 + 3 - 3}
    assert steps(5, [20, 10], LINK, ranks=[2], hidden=60) == {1: 5, 2: 5 + 3}  # nothing hides the last bucket
    assert steps(5, [20, 10], LINK, ranks=[2, 3], fixed=2)[2] == 5 + 4 + 3 + 2
    row = forecast(5, [20, 10], LINK, ranks=[2], batch=30).rows[1]
    assert (row.waiting, row.efficiency, row.samples, row.machines) == (7, 5 / 12, 60 / 12, 1)


def test_what_a_rank_computes_may_depend_on_the_ranks_of_its_machine():
    compute = {1: 3, 2: 5, 4: 8}.get
    assert steps(compute, 0, Link(0, 1), ranks=(1, 2, 4)) == {1: 3, 2: 5, 4: 8}
    assert steps(compute, 0, Link(0, 1), ranks=(1, 2, 4), per_machine=2) == {1: 3, 2: 5, 4: 5}
    assert steps(compute, 0, Link(0, 1), ranks=(4,), per_machine=1) == {1: 3, 4: 3}


def test_ranks_fill_machines_one_after_the_other():
    found = forecast(5, 20, LINK, ranks=(2, 4, 6, 8), per_machine=4, inter=Link(100, 2))
    assert [row.machines for row in found.rows] == [1, 1, 1, 2, 2]
    assert found.rows[1].step == 5 + 4
    assert found.rows[4].step == 5 + 4 * 100 + 10 * 1 + 2 * 7 / 8 * 20 / 2


def test_the_time_to_a_loss_is_steps_by_the_noise_scale_times_their_length():
    def brute(n, noise, batch, step, first):
        return step * (1 + noise / (n * batch)) / (first * (1 + noise / batch))

    for noise in (1e-6, 100, 1e9):
        for row in forecast(5, 20, LINK, batch=64, noise=noise).rows:
            assert row.time == pytest.approx(brute(row.ranks, noise, 64, row.step, 5), rel=1e-9)
    nothing, endless = (forecast(5, 20, LINK, batch=64, noise=noise).rows for noise in (0, math.inf))
    plain = forecast(5, 20, LINK).rows
    assert [row.time for row in nothing] == [pytest.approx(row.step / 5) for row in nothing]
    assert [row.time for row in endless] == [row.time for row in plain] == [r.step / 5 / r.ranks for r in plain]


def test_ranks_are_worth_it_while_each_that_is_added_brings_a_share_of_the_first():
    # With a free network and batch = noise scale, n ranks are 2 n / (n + 1) times as fast: 1, 1.33, 1.6, 1.78, 1.88.
    free, noisy = Link(0, math.inf), {"batch": 10, "noise": 10}
    assert [forecast(1, 8, free, worth=w, **noisy).best for w in (0.5, 0.3, 0.1, 0.04, 0.01)] == [1, 2, 4, 8, 16]
    assert forecast(1, 8, free).best == 16
    # The first step costs, those after it do not: 2 ranks are no gain, but 4 are one over 1.
    assert [row.speed for row in forecast(1, 0, Link(0.5, 1), ranks=(2, 4), topology="tree", worth=0.1).rows] == [
        1, 1, pytest.approx(4 / 3)
    ]  # fmt: skip
    assert forecast(1, 0, Link(0.5, 1), ranks=(2, 4), topology="tree", worth=0.1).best == 4


@pytest.mark.parametrize("topology", ["ring", "tree"])
@pytest.mark.parametrize("options", [{}, {"per_machine": 4, "inter": SLOW}, {"batch": 32, "noise": 500.0}])
def test_what_holds_for_any_link(topology, options):
    options = options | {"topology": topology, "hidden": 0.01}
    grid = [Link(latency, bandwidth) for latency in (0, 1e-6, 1e-3) for bandwidth in (1e7, 1e9, math.inf)]
    for slow, fast in itertools.product(grid, grid):
        a, b = (forecast(0.02, [4e6, 1e6], link, **options) for link in (slow, fast))
        assert (a.rows[0].efficiency, a.rows[0].time, a.rows[0].waiting) == (1, 1, 0)
        assert all(row.efficiency <= 1 for row in a.rows)
        if fast.latency <= slow.latency and fast.bandwidth >= slow.bandwidth:
            assert all(y.step <= x.step and y.time <= x.time for x, y in zip(a.rows, b.rows, strict=True))
            assert b.best >= a.best
    waits = [row.waiting for row in forecast(0.02, 4e6, SLOW, **options).rows]
    assert waits == sorted(waits)  # more ranks never wait for less


def test_a_tree_is_quicker_where_latency_and_ranks_are_many_and_a_ring_where_bytes_are():
    def ring_and_tree(size, n):
        return [steps(1e-9, size, SLOW, ranks=[n], topology=name)[n] for name in ("ring", "tree")]

    ring, tree = ring_and_tree(1e3, 64)
    assert tree < ring / 5
    ring, tree = ring_and_tree(1e9, 4)
    assert ring < tree


@pytest.mark.parametrize(
    ("options", "start"),
    [
        (
            {"link": Link(1, 1)},
            "More than one rank is not worth it.\n2 would take 1.5 times as long for the same samples as one.",
        ),
        ({"link": Link(0, 1e9)}, "16 ranks are worth it: 16.0 times as fast for the same samples as one, at an"),
        (
            {"link": Link(0, 1e9), "batch": 8, "noise": 20},
            "2 ranks are worth it: 1.6 times as fast to the same loss as one, at an efficiency of 100%.\nWith 4 each "
            "added rank would bring less than 50% of what one rank does alone: 2.2 times as fast as one.",
        ),
    ],
)
def test_a_forecast_is_words_and_a_table(options, start):
    text = str(forecast(1, 0, **options))
    assert text.startswith(start)
    words, table = text.split("\n\n")
    assert table.split("\n")[0].split() == [
        "ranks", "machines", "step", "ms", "waiting", "efficiency", "samples/s", "time",
        *["to", "loss"][: 2 * ("noise" in options)],
    ]  # fmt: skip
    assert len({len(line) for line in table.split("\n")}) == 1
    assert len(table.split("\n")) == 6


def test_json_has_all_of_it():
    found = forecast(5, 20, Link(1, math.inf, 0.1), batch=8, noise=math.inf, inter=SLOW)
    read = json.loads(found.to_json(), parse_constant=lambda name: pytest.fail(name))
    assert read["link"] == {"latency": 1, "bandwidth": None, "error": 0.1}
    assert read["rows"] == [row._asdict() for row in found.rows]
    assert read["best"] == found.best
    assert json.loads(forecast(5, 20, LINK).to_json())["inter"] is None


@pytest.mark.parametrize(
    ("wrong", "match"),
    [
        ({"ranks": [0]}, "ranks=0; it is the number of ranks, 1 or more"),
        ({"ranks": [2, 4.0]}, r"ranks=4\.0"),
        ({"compute": 0}, "compute=0"),
        ({"per_machine": 0}, "per_machine=0"),
        ({"size": []}, r"size=\[\]"),
        ({"size": -1}, r"size=\[-1\]"),
        ({"hidden": -1}, "hidden=-1"),
        ({"fixed": -1}, "fixed=-1"),
        ({"batch": 0}, "batch=0"),
        ({"noise": 5}, "batch=None"),
        ({"noise": -5, "batch": 3}, "noise=-5"),
        ({"noise": math.nan, "batch": 3}, "noise=nan"),
        ({"topology": "star"}, "'ring' or 'tree'"),
    ],
)
def test_what_cannot_be_is_refused(wrong, match):
    with pytest.raises(ValueError, match=match):
        forecast(**{"compute": 1, "size": 8, "link": LINK} | wrong)


def test_the_plot_marks_the_number_that_is_worth_it(plt):
    found = forecast(5, 20, LINK)
    ax = found.plot()
    assert [list(line.get_ydata()) for line in ax.lines[:2]] == [[1, 2, 4, 8, 16], [row.speed for row in found.rows]]
    assert ax.lines[2].get_xdata()[0] == found.best
    assert ax.get_ylabel() == "times as fast for the same samples"
