import json
from pathlib import Path

import pytest

from learnerkit.sweep.config import ConfigError, changes, read_config

COMET = {
    "algorithm": "bayes",
    "spec": {"maxCombo": 30, "objective": "minimize", "metric": "loss", "minSampleSize": 100, "retryLimit": 20,
             "retryAssignLimit": 0},
    "parameters": {
        "hidden-layer-size": {"type": "integer", "scalingType": "uniform", "min": 5, "max": 100},
        "rate": {"type": "float", "scalingType": "loguniform", "min": 1e-5, "max": 0.1},
        "momentum": {"type": "double", "scaling_type": "linear", "min": 0.8, "max": 0.99},
        "batch": {"type": "discrete", "values": [16, 32, 64]},
        "act": {"type": "categorical", "values": ["relu", "tanh"]},
    },
    "name": "My search",
    "trials": 2,
}  # fmt: skip
OPTUNA = {
    "sampler": {"name": "TPESampler", "n_startup_trials": 4},
    "pruner": {"name": "PatientPruner", "patience": 1, "wrapped_pruner": "MedianPruner"},
    "metric": "accuracy",
    "direction": "maximize",
    "n_trials": 20,
    "parameters": {
        "lr": {"type": "float", "low": 1e-5, "high": 0.1, "log": True},
        "drop": {"type": "float", "low": 0, "high": 0.5, "step": 0.1},
        "depth": {"type": "int", "low": 2, "high": 16, "log": True},
        "act": {"type": "categorical", "choices": ["relu", None, True]},
    },
}


def read(data):
    path = Path("search.json")
    path.write_text(data if isinstance(data, str) else json.dumps(data))
    return read_config(path)


def test_comets_config_is_read_as_it_is():
    config = read("\ufeff# We pick\u2028the Bayes algorithm:\n" + json.dumps(COMET))
    assert (config.metric, config.maximize, config.total, config.repeats, config.retries) == ("loss", False, 60, 2, 20)
    assert type(config.sampler(0)).__name__ == "TPESampler"
    assert type(config.pruner()).__name__ == "MedianPruner"
    assert type(read(OPTUNA | {"pruner": None}).pruner()).__name__ == "NopPruner"
    kinds = {name: repr(each) for name, each in config.parameters.items()}
    assert kinds == {
        "hidden-layer-size": "IntDistribution(high=100, log=False, low=5, step=1)",
        "rate": "FloatDistribution(high=0.1, log=True, low=1e-05, step=None)",
        "momentum": "FloatDistribution(high=0.99, log=False, low=0.8, step=None)",
        "batch": "CategoricalDistribution(choices=(16, 32, 64))",
        "act": "CategoricalDistribution(choices=('relu', 'tanh'))",
    }


def test_optunas_words_are_read():
    config = read(OPTUNA)
    assert (config.maximize, config.total, config.retries) == (True, 20, 3)
    kinds = {name: repr(each) for name, each in config.parameters.items()}
    assert kinds == {
        "lr": "FloatDistribution(high=0.1, log=True, low=1e-05, step=None)",
        "drop": "FloatDistribution(high=0.5, log=False, low=0.0, step=0.1)",
        "depth": "IntDistribution(high=16, log=True, low=2, step=1)",
        "act": "CategoricalDistribution(choices=('relu', None, True))",
    }
    assert type(config.pruner()).__name__ == "PatientPruner"
    assert "random" in str(read(OPTUNA | {"sampler": "random"}).sampler(0)).lower()


def test_the_grid_has_every_combination():
    parameters = COMET["parameters"] | {"rate": {"type": "float", "scalingType": "loguniform", "min": 0.01, "max": 1}}
    config = read(COMET | {"algorithm": "grid", "spec": {"gridSize": 3}, "trials": 1, "parameters": parameters})
    sizes = dict(zip(config.parameters, config.grid, strict=True))
    assert sizes["hidden-layer-size"] == [5, 52, 100]
    assert sizes["rate"] == pytest.approx([0.01, 0.1, 1])
    assert sizes["batch"] == [16, 32, 64]
    assert config.total == 3 * 3 * 3 * 3 * 2 == len({str(point) for point in config.combinations()})
    assert read(COMET | {"algorithm": "grid", "spec": {"maxCombo": 5}}).total == 5 * 2
    steps = {
        "a": {"type": "int", "min": 1, "max": 9, "step": 4},
        "b": {"type": "float", "min": 0, "max": 1, "step": 0.5},
    }
    assert read({"algorithm": "grid", "parameters": steps}).grid == [[1, 5, 9], [0, 0.5, 1.0]]
    assert read({"algorithm": "grid", "parameters": {"a": {"type": "int", "min": 1, "max": 4}}}).grid == [[1, 2, 3, 4]]
    tenths = {"a": {"type": "float", "min": 0.1, "max": 0.3, "step": 0.1}}
    assert read({"algorithm": "grid", "parameters": tenths}).grid == [[0.1, 0.2, 0.3]]
    own = {"a": {"type": "float", "min": 0, "max": 1}, "b": {"type": "float", "min": 1, "max": 1}}
    assert read({"algorithm": "grid", "gridSize": 3, "parameters": own}).grid == [[0, 0.5, 1], [1]]


LR = {"type": "float", "min": 1e-3, "max": 1}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("[1, 2]", r"search.json: got \[1, 2\]; it is a JSON object"),
        ("{,}", "search.json is not valid JSON: .*line 1"),
        ({"spec": 3}, "spec: got 3; it is a JSON object"),
        ({"algorithm": "bayesian"}, "algorithm: got .*; it is one of random, grid, bayes; did you mean 'bayes'"),
        ({"sampler": "tpe", "algorithm": "bayes"}, "algorithm and sampler, which mean the same"),
        ({"sampler": "BruteForce"}, "sampler: got .*; it is a name or .* CmaEsSampler"),
        ({"sampler": "TPS"}, "sampler: got \"TPS\"; it is a name or .* RandomSampler, TPESampler"),
        ({"sampler": {"name": "tpe", "n_start": 3}}, "sampler.n_start: TPESampler has no such option; it has .*seed"),
        ({"pruner": {"name": "Percentile"}}, "pruner: PercentilePruner refuses these options: .*percentile"),
        ({"metric": "accuracy"}, "objective/direction is missing; say whether to minimize or maximize 'accuracy'"),
        ({"metric": 3}, "metric: got 3; it is the name"),
        ({"objective": "min"}, "objective/direction: got \"min\"; it is one of minimize, maximize"),
        ({"spec": {"maxCombo": -1}}, "maxCombo/n_trials: got -1; it is a whole number .*, 0 or more"),
        ({"spec": {"maxCombo": 2}, "n_trials": 3}, "got maxCombo and n_trials, which mean the same"),
        ({"spec": {"metric": "loss"}, "metric": "loss"}, "metric is given twice, in spec and beside it"),
        ({"spec": {"retrylimit": 2}}, "retrylimit: there is no such entry; allowed are .* did you mean 'retryLimit'"),
        ({"spec": {"randomize": 1}}, "randomize: there is no such entry"),
        ({"parameters": {}}, "parameters: there are none"),
        ({"parameters": {"lr": 3}}, "parameters.lr: got 3; it is a JSON object"),
        ({"parameters": {"lr": {"min": 1}}}, "parameters.lr: type is missing; it is one of integer"),
        ({"parameters": {"lr": LR | {"type": "flot"}}}, "parameters.lr: type: got \"flot\".*did you mean 'float'"),
        ({"parameters": {"lr": LR | {"scalingType": "log"}}}, "scalingType/scaling_type: got .* it is one of linear"),
        ({"parameters": {"lr": LR | {"maxx": 2}}}, "parameters.lr: maxx: there is no such .*; did you mean 'max'"),
        ({"parameters": {"lr": LR | {"high": 2}}}, "parameters.lr: got max and high, which mean the same"),
        ({"parameters": {"lr": LR | {"min": 2}}}, "parameters.lr: Optuna refuses .*low <= high"),
        ({"parameters": {"lr": LR | {"min": "0"}}}, "parameters.lr: min/low: got \"0\"; it is a number"),
        ({"parameters": {"lr": LR | {"min": 0, "log": True}}}, "parameters.lr: Optuna refuses .*low > 0"),
        ({"parameters": {"lr": {"type": "float", "min": 0}}}, "min/low and max/high are missing"),
        ({"parameters": {"lr": {"type": "float", "scalingType": "normal"}}}, "it is one of linear, uniform, log"),
        ({"parameters": {"lr": LR | {"log": True, "scalingType": "uniform"}}}, "got log and scalingType"),
        ({"parameters": {"lr": LR | {"log": True, "step": 0.1}}}, "parameters.lr: Optuna refuses .*step"),
        ({"parameters": {"n": LR | {"type": "int"}}}, "parameters.n: min/low: got 0.001; it is a whole number"),
        ({"parameters": {"n": {"type": "discrete", "values": ["a"]}}}, "values/choices: got .*a list of numbers"),
        ({"parameters": {"n": {"type": "categorical", "values": []}}}, "values/choices: got .*at least one"),
        ({"algorithm": "grid", "gridSize": 100, "parameters": dict.fromkeys("abc", LR)}, "100 x 100 x 100 points"),
        # What would be a traceback, or nothing, and take without end
        ("[" * 200_000, "search.json: it is nested too deeply"),
        ('{"seed": ' + "[" * 100 + "]" * 100 + "}", "parameters: there are none"),
        ('{"parameters": {"lr": {"type": "float", "max": 1' + "0" * 400 + "}}}",
         r"max/high: got 1000.* \(401 characters\) .*; it is a number of at most 1e\+100"),
        ('{"parameters": {"lr": {"type": "float", "max": 1' + "0" * 5000 + "}}}", "is not valid JSON: Exceeds"),
        ('{"parameters": {"lr": {"type": "float", "max": NaN}}}', r"parameters\.lr: max/high: got NaN; it is a number"),
        ('{"parameters": {"n": {"type": "discrete", "values": [1, NaN]}}}', "got NaN; .* a number is at most"),
        ({"parameters": {"n": {"type": "categorical", "values": ["a\0"]}}}, r"got .*u0000.*; a text has no control"),
        ({"parameters": {"lr": LR | {"max": 1e308}}}, r"parameters\.lr: max/high: got 1e\+308; it is a number"),
        ({"parameters": {"lr": LR | {"step": 5e-324}}}, "parameters.lr: Optuna refuses these numbers"),
        ({"sampler": 0}, "sampler: got 0; it is a name or"),
        ({"pruner": 0}, "pruner: got 0; it is a name or"),
        ({"parameters": {"n": {"type": "categorical", "values": [0, False]}}}, r"\[0, false\]; some of them are equal"),
        ({"parameters": {"l\x1b[2J\nr": LR}}, r'got the name "l\\u001b\[2J\\nr"; a name has 1 to'),
        ({"metric": "loss\n"}, r'metric: got "loss\\n"; it is the name'),
        ('{"parameters": {"lr": 1, "lr": 2}}', 'search.json: "lr" is given twice in one object'),
    ],
)  # fmt: skip
def test_a_bad_entry_is_named_with_what_is_allowed(change, said):
    data = change if isinstance(change, str) else {"parameters": {"lr": LR}} | change
    with pytest.raises(ConfigError, match=said):
        read(data)


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("change", "size"),
    [({"step": 1e-10}, "9,990,000,001"), ({"type": "int", "min": 0, "max": 10**11, "step": 2}, "50,000,000,001")],
)
def test_a_grid_is_counted_before_it_is_made(change, size):
    with pytest.raises(ConfigError, match=f"parameters.lr: a grid has {size} values of it; at most 100,000 points"):
        read({"algorithm": "grid", "parameters": {"lr": LR | change}})


def test_a_sampler_that_needs_another_package_is_refused_before_anything_starts(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="sampler: CmaEsSampler needs cmaes: pip install cmaes"):
        read(OPTUNA | {"sampler": "cmaes"})
    with pytest.raises(ConfigError, match="pruner: WilcoxonPruner needs scipy: pip install scipy"):
        read(OPTUNA | {"pruner": "WilcoxonPruner"})


def test_a_search_may_grow_but_not_change():
    before, after = read(OPTUNA).data, read(OPTUNA | {"n_trials": 40, "retryLimit": 1, "seed": 2}).data
    assert list(changes(before, after)) == ["seed"]
