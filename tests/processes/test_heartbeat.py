"""Where a rank says that it is."""

from learnerkit.endings import where
from learnerkit.events import Event


def test_a_step_is_named_where_there_is_a_batch():
    facts = {"callback": "Own", "epoch": 2, "step": 10}  # outside of a batch the step is one of other batches
    with_step = {event for event in Event if where(facts | {"event": event}).endswith("of Own (epoch 2, step 10)")}
    without = {event for event in Event if where(facts | {"event": event}).endswith("of Own (epoch 2)")}
    assert without == {event for event in Event if event.rpartition("_")[2] in ("fit", "epoch", "train", "validate")}
    assert with_step == set(Event) - without
    in_loop = {"event": "the loop, after after_loss", "callback": "", "epoch": 0, "step": 3}
    assert where(in_loop) == "the loop, after after_loss (epoch 0, step 3)"
    evaluated = where(in_loop | {"phase": "evaluation"})
    assert evaluated == "the loop, after after_loss (epoch 0, evaluation batch 3)"
    assert where(in_loop | {"event": "the loop, after before_validate"}).endswith("before_validate (epoch 0)")
