import json
import math
import subprocess
import sys
import time

import pytest

from learnerkit import sweep
from learnerkit.sweep.workers import last_value


def test_params_are_the_defaults_in_a_script_that_runs_by_itself():
    assert vars(sweep.params(lr=0.1, bs=64)) == {"lr": 0.1, "bs": 64}


def test_values_that_are_given_by_hand_and_cannot_be_read_are_named(monkeypatch):
    for wrong in ("lr=0.5", "{lr: 0.5}", "[0.5]"):
        monkeypatch.setenv("LEARNERKIT_PARAMS", wrong)
        with pytest.raises(ValueError, match="got LEARNERKIT_PARAMS=.*; it is a JSON object, such as"):
            sweep.params(lr=0.1)
    monkeypatch.setenv("LEARNERKIT_PARAMS", "")
    assert vars(sweep.params(lr=0.1)) == {"lr": 0.1}


def test_params_are_the_trials_values(monkeypatch):
    monkeypatch.setenv("LEARNERKIT_PARAMS", json.dumps({"lr": 0.5, "hidden-size": 3}))
    assert vars(sweep.params(lr=0.1, bs=64, hidden_size=1)) == {"lr": 0.5, "bs": 64, "hidden_size": 3}
    said = "the search varies 'lr', and params has hidden_size, l_r: both need the same names, .*; did you mean 'l_r'"
    with pytest.raises(ValueError, match=said):
        sweep.params(hidden_size=1, l_r=3)
    # With --as-arguments the others are arguments, and need not be here.
    place = {"folder": "x", "trial": 0, "metric": "loss", "as_arguments": True}
    monkeypatch.setenv("LEARNERKIT_TRIAL", json.dumps(place))
    assert vars(sweep.params(hidden_size=1, l_r=3)) == {"hidden_size": 3, "l_r": 3}


def test_a_report_has_the_metric_of_the_search(monkeypatch):
    monkeypatch.setenv("LEARNERKIT_TRIAL", json.dumps({"folder": "x", "trial": 0, "metric": "valid_loss"}))
    assert sweep.report("valid_loss").metric == "valid_loss"
    with pytest.raises(ValueError, match="got report.'loss'., and the search's config has the metric 'valid_loss'"):
        sweep.report("loss")
    with pytest.raises(ValueError) as caught:
        sweep.report("valid_los")  # either may be misspelt
    assert "did you mean" not in str(caught.value)


def test_without_optuna_the_error_says_what_to_install(script_env, tmp_path):
    (tmp_path / "c.json").write_text('{"parameters": {"x": {"type": "float", "min": 0, "max": 1}}}')
    (tmp_path / "t.py").touch()
    code = "import sys; sys.modules['optuna'] = None; from learnerkit.sweep.cli import main; main(['c.json', 't.py'])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=script_env, timeout=60)
    assert done.returncode == 2
    assert done.stderr == "learnerkit.sweep: error: a search needs Optuna: pip install 'learnerkit[sweep]'\n"


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("accuracy: 0.5\nepoch 2, accuracy: 0.75, loss: 3", 0.75),
        ("accuracy=.5 top5_accuracy=0.9", 0.5),
        ('{"epoch": 1, "accuracy": 5e-1}\n{"epoch": 2, "loss": 3}', 0.5),
        ("{'accuracy': 0.5}", 0.5),
        ("accuracy 0.5%", 0.5),
        ("the accuracy of all\naccuracy-5: 3", None),
        ("epoch  loss  accuracy   time\n  0  1.5  0.25  00:01\n  1  1.2  0.5  00:02\nsaved 3 files now", 0.5),
        ("accuracy: 0.25\naccuracy: -inf", float("-inf")),
        ('{"accuracy": 0.25}\n{"accuracy": null}', pytest.approx(math.nan, nan_ok=True)),  # JSON has no NaN
        ("epoch  loss  accuracy\n1  0.3  null", pytest.approx(math.nan, nan_ok=True)),
        ("The final accuracy: 0.75.", 0.75),
        ("accuracy: 0.7.5", None),
        ("accuracy: 1,234.5", None),
        ("accuracy: 3/6", None),
        ("\naccuracy: 0.25\n\n", 0.25),
        ("epoch  accuracy\n\n0      0.25\n\n", 0.25),
        ("the best accuracy yet\naccuracy: 0.25\nsaved in 0.5 s", 0.25),
        ("phase  loss  accuracy\nvalid  1.5  0.25", 0.25),
        ("epoch  accuracy\n0  0.25\nepoch 0: no better accuracy than 0.5 in 1 row\n1  0.5", 0.5),
        ("accuracy: 0.25 train/accuracy: 0.5", 0.25),
        ("epoch  accuracy\n0  0.5\nepoch  rmse\n0  1.25", 0.5),
        ("epoch  loss  accuracy\nepoch 0 begins\n0  1.5  0.5", 0.5),
    ],
)
def test_the_last_printed_value_counts(text, value):
    assert last_value(text.splitlines(), "accuracy") == value


def test_a_long_line_is_read_in_a_moment():
    began = time.process_time()
    for line in (" " * 40_000 + "x", ": " + "1" * 40_000 + "x", ": 1e" + "1" * 40_000 + "x", " accuracy" * 4000):
        assert last_value([f"accuracy{line}"], "accuracy") is None
    assert time.process_time() - began < 2
