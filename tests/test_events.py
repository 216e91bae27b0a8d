"""The events, their order, and the text that describes it."""

import re

import pytest
from helpers import EVALUATION, FIT, TRAIN, VALIDATE, make_dls, make_learner, spy, words

from learnerkit import Callback, events
from learnerkit.events import INNER_EVENTS, LOOP, CancelException, Event

FASTAI = words("""
    after_create before_fit before_epoch before_train before_batch after_pred after_loss before_backward
    after_cancel_backward after_backward before_step after_cancel_step after_step after_cancel_batch after_batch
    after_cancel_train after_train before_validate after_cancel_validate after_validate after_cancel_epoch after_epoch
    after_cancel_fit after_fit
""")


@pytest.fixture
def log():
    return []


@pytest.fixture
def learn(log):
    return make_learner(cbs=spy(log))


def test_the_events_are_fastais_and_five_cleanups_in_the_order_of_the_loop():
    assert len(FASTAI) == 24
    assert [event for event in Event if not event.startswith("cleanup_")] == FASTAI
    cleanups = [event for event in Event if event.startswith("cleanup_")]
    assert cleanups == [f"cleanup_{level}" for level in ("batch", "train", "validate", "epoch", "fit")]


def test_an_event_is_a_plain_string_equal_to_its_name():
    for event in Event:
        assert event == event.name == str(event)
        assert isinstance(event, str)


def test_inner_events_are_fastais_ten_the_forgotten_one_and_the_cleanup():
    first, last = FASTAI.index("before_batch"), FASTAI.index("after_batch")
    assert sorted(INNER_EVENTS) == sorted([*FASTAI[first : last + 1], "cleanup_batch"])
    assert "after_cancel_step" in INNER_EVENTS


def test_the_text_of_the_loop_names_every_event_and_every_cancel():
    words = LOOP.split()
    assert set(Event) <= set(words)
    cancels = {name for name in vars(events) if name.startswith("Cancel") and name != "CancelException"}
    assert cancels == {word for word in words if word.startswith("Cancel")}
    assert len(cancels) == 7
    assert all(issubclass(getattr(events, name), CancelException) for name in cancels)
    assert LOOP in Event.__doc__


def test_creation_fires_once(log, learn):
    assert log == ["after_create"]


def test_every_epoch_is_alike(log, learn):
    log.clear()
    learn.fit(3)
    epoch = FIT[1:-2]
    assert log == ["before_fit", *epoch * 3, "after_fit", "cleanup_fit"]


def test_no_epoch_is_a_fit_all_the_same(log, learn):
    log.clear()
    learn.fit(0)
    assert log == ["before_fit", "after_fit", "cleanup_fit"]


@pytest.mark.parametrize("verb", ["validate", "get_preds"])
def test_an_evaluation_fires_the_golden_sequence_of_events(log, learn, verb):
    log.clear()
    getattr(learn, verb)()
    assert log == EVALUATION


@pytest.mark.parametrize("where", ["after_pred", "after_batch", "before_validate", "after_epoch"])
@pytest.mark.parametrize("verb", ["validate", "get_preds"])
def test_evaluation_in_mid_fit_leaves_the_outer_events_out(where, verb):
    log, asked = [], []

    def ask(cb):
        if not asked:
            asked.append(True)
            start = len(log)
            getattr(cb.learn, verb)()
            inner[:] = log[start:]
            del log[start:]

    inner = []
    learn = make_learner(cbs=[spy(log), Callback(**{where: ask}, order=1)])
    log.clear()
    learn.fit(1)
    assert inner == VALIDATE
    assert log == FIT


def test_without_validation_data_there_is_no_validation(log):
    learn = make_learner(make_dls(valid=None), cbs=spy(log))
    log.clear()
    learn.fit(1)
    assert log == ["before_fit", "before_epoch", *TRAIN, "after_epoch", "cleanup_epoch", "after_fit", "cleanup_fit"]


# The text is executed: sections and loops by their indentation


def play(counts):
    """The events of a fit as LOOP tells them: `counts` is how often each loop runs, in the order of the text."""
    lines = [line for line in LOOP.splitlines() if line.strip()]
    rows = [((len(line) - len(line.lstrip())) // 4, line.strip()) for line in lines]
    counts = iter(counts)

    def block(rows):
        found, i = [], 0
        while i < len(rows):
            depth, text = rows[i]
            end = next((j for j in range(i + 1, len(rows)) if rows[j][0] <= depth), len(rows))
            if text.startswith("for each"):
                times = next(counts)
                found += times * block(rows[i + 1 : end])
            elif not re.search(r"\bon Cancel", text):
                found += [word for word in text.split() if word in list(Event)]
                found += block(rows[i + 1 : end])
            i = end
        return found

    return block(rows)


@pytest.mark.parametrize("epochs", [1, 2])
@pytest.mark.parametrize(("train", "valid"), [(2, 1), (3, 2)])
def test_the_text_of_the_loop_is_what_happens(epochs, train, valid):
    log = []
    make_learner(make_dls(4 * train, 4 * valid), cbs=spy(log)).fit(epochs)
    assert log == play([epochs, train, valid])
