"""The config of a search: a JSON file in the format of Comet's optimizer, with Optuna's names, or with both.

A search is a file, rather than a function of a trial as in Optuna, so that any script can be searched, in any number of
processes and without a line of Optuna in it.
"""

import importlib.util
import inspect
import itertools
import json
import math
import random
import warnings
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist
from types import ModuleType
from typing import Any

from learnerkit.text import did_you_mean, escaped, escaped_line, printable

GRID_LIMIT = 100_000  # more combinations than anybody waits for
NUMBER_LIMIT = 1e100  # the largest number in a config: sums and differences of such numbers are finite
STEP_LIMIT = 1e15  # values between two bounds, which Optuna can still tell apart
TAIL = 1e-3  # the share of a normal distribution without bounds that is left out on either side


def optuna() -> Any:
    """Import Optuna.

    Raises:
        ImportError: it is not installed.
    """
    try:
        with warnings.catch_warnings(action="ignore"):  # In a notebook Optuna's tqdm warns without ipywidgets.
            import optuna
            import optuna.study
    except ImportError as error:
        raise ImportError("a search needs Optuna: pip install 'learnerkit[sweep]'") from error
    return optuna


class ConfigError(ValueError):
    """The config cannot be used; the text names the entry, and what is allowed."""


class Section:
    """A JSON object whose entries are taken one by one; what is left at the end is an error.

    Args:
        entries: the object.
        where: its place in the file, for messages, such as 'parameters.lr: '.
    """

    def __init__(self, entries: Any, where: str = "") -> None:
        if not isinstance(entries, dict):
            raise ConfigError(f'{where}got {shown(entries)}; it is a JSON object, {{"name": value, ...}}')
        self.entries, self.where = dict(entries), where
        self.known: list[str] = []

    def take(self, *names: str, default: Any = None) -> Any:
        """Return the entry that has one of these names."""
        self.known += names
        given = [name for name in names if name in self.entries]
        if len(given) > 1:
            raise ConfigError(f"{self.where}got {' and '.join(given)}, which mean the same; leave one out")
        return self.entries.pop(given[0]) if given else default

    def one_of(self, allowed: list[str], *names: str, default: Any = None) -> Any:
        """Return an entry that is one of some words."""
        value = self.take(*names, default=default)
        if value not in allowed and value is not default:
            self.refuse(names, value, "it is one of " + ", ".join(allowed) + did_you_mean(str(value), allowed))
        return value

    def number(self, *names: str, whole: bool = False, least: float | None = None, default: Any = None) -> Any:
        """Return an entry that is a number."""
        value = self.take(*names, default=default)
        if value is default:
            return value
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or (whole and value % 1 != 0) or (least is not None and value < least):
            what = "a whole number" if whole else "a number"
            self.refuse(names, value, f"it is {what}" + (f", {least:g} or more" if least is not None else ""))
        return int(value) if whole else value

    def flag(self, *names: str) -> bool:
        """Return an entry that is true or false."""
        value = self.take(*names, default=False)
        if not isinstance(value, bool):
            self.refuse(names, value, "it is true or false")
        return bool(value)

    def refuse(self, names: tuple[str, ...], value: Any, allowed: str) -> None:
        """Raise an error that names an entry."""
        raise ConfigError(f"{self.where}{'/'.join(names)}: got {shown(value)}; {allowed}")

    def end(self) -> None:
        """Refuse entries that were not taken."""
        for name in self.entries:
            raise ConfigError(
                f"{self.where}{name}: there is no such entry; allowed are {', '.join(self.known)}"
                + did_you_mean(name, self.known)
            )


def shown(value: Any) -> str:
    """Return a value of a config for a message."""
    return printable(json.dumps(value))


def read_json(path: Path) -> Any:
    """Read a file of JSON, which may have comments, as Comet's files have.

    Raises:
        ConfigError: it cannot be read, or has a name twice in one object.
    """

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        entries: dict[str, Any] = {}
        for name, value in pairs:
            if name in entries:
                raise ConfigError(f"{path}: {shown(name)} is given twice in one object; leave one out")
            entries[name] = value
        return entries

    def whole(digits: str) -> float:  # Python refuses to read thousands of digits as an integer
        return int(digits) if len(digits) <= 600 else float(digits)

    try:
        lines = path.read_text(encoding="utf-8").splitlines()
        text = "\n".join("" if line.lstrip().startswith("#") else line for line in lines)
        return json.loads(text, object_pairs_hook=unique, parse_int=whole)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    except json.JSONDecodeError as error:
        raise ConfigError(f"{path} is not valid JSON: {error}") from error
    except RecursionError:
        raise ConfigError(f"{path}: it is nested too deeply") from None


def check_values(data: Any, where: str = "", depth: int = 0) -> None:
    """Refuse names, texts and numbers of which no search can make use, wherever they stand in a config."""
    if depth > 20:
        raise ConfigError(f"{where}it is nested too deeply")
    if isinstance(data, dict):
        for name, value in data.items():
            if escaped_line(name) != name or not 0 < len(name) <= 200:
                raise ConfigError(
                    f"{where}got the name {shown(name)}; a name has 1 to 200 characters, and no control characters"
                )
            check_values(value, f"{where.replace(': ', '.')}{name}: ", depth + 1)
    elif isinstance(data, list):
        for value in data:
            check_values(value, where, depth + 1)
    elif isinstance(data, str):
        if escaped(data) != data:
            raise ConfigError(f"{where}got {shown(data)}; a text has no control characters")
    elif isinstance(data, int | float) and not abs(data) <= NUMBER_LIMIT:  # NaN is one of these, too
        raise ConfigError(f"{where}got {shown(data)}; a number is at most {NUMBER_LIMIT:g}, and at least minus that")


@dataclass(frozen=True)
class Parameter:
    """A parameter of the search, and the distribution of its values.

    Args:
        choices: the values, if they are listed; empty for a number.
        low, high: its bounds; `None` only with `normal`.
        whole: it is an integer.
        log: it is drawn on a logarithmic scale.
        step: the distance of its values.
        normal: mean and standard deviation, of its logarithm if `log`. Optuna knows no normal distribution, so it
            draws the quantile.
        n_grid: how many values of it a grid has; `None`: as the search says.
    """

    choices: tuple[Any, ...] = ()
    low: float | None = None
    high: float | None = None
    whole: bool = False
    log: bool = False
    step: float | None = None
    normal: tuple[float, float] | None = None
    n_grid: int | None = None

    def distribution(self) -> Any:
        """Return Optuna's distribution."""
        kinds = optuna().distributions
        if self.choices:
            return kinds.CategoricalDistribution(self.choices)
        if self.normal:
            return kinds.FloatDistribution(*self._quantiles())
        if self.whole:
            return kinds.IntDistribution(self.low, self.high, log=self.log, step=self.step or 1)
        return kinds.FloatDistribution(self.low, self.high, log=self.log, step=self.step)

    def value(self, drawn: Any) -> Any:
        """Turn the value that Optuna has drawn into the one for the script."""
        if self.normal is None:
            return drawn
        x = NormalDist(*self.normal).inv_cdf(drawn)
        x = math.exp(x) if self.log else x
        x = min(max(x, x if self.low is None else self.low), x if self.high is None else self.high)
        return round(x) if self.whole else x

    def _quantiles(self) -> tuple[float, float]:
        bounds = (TAIL if self.low is None else self.low, 1 - TAIL if self.high is None else self.high)
        given = [bound is not None for bound in (self.low, self.high)]
        cdf = NormalDist(*(self.normal or (0, 1))).cdf
        ends = [cdf(math.log(b) if self.log else b) if g else b for b, g in zip(bounds, given, strict=True)]
        return max(ends[0], 1e-9), min(ends[1], 1 - 1e-9)

    def grid(self, size: int) -> list[Any]:
        """Return values from one end to the other, as Optuna would draw them: all if there are few, else `size`.

        Raises:
            ConfigError: there are too many.
        """
        if self.choices:
            return list(self.choices)
        size = self.n_grid or size
        low, high = self._quantiles() if self.normal else (self.low or 0.0, self.high or 0.0)
        step = None if self.normal else self.step or (1 if self.whole and high - low < size else None)
        if step:
            size = int((high - low) / step + 1e-9) + 1
        if size > GRID_LIMIT:
            raise ConfigError(
                f"a grid has {size:,} values of it; at most {GRID_LIMIT:,} points are allowed: use random"
            )
        if step:
            values = [low + i * step for i in range(size)]
        else:
            log = self.log and not self.normal
            ends = (math.log(low), math.log(high)) if log else (low, high)
            inner = [ends[0] + (ends[1] - ends[0]) * i / max(size - 1, 1) for i in range(size)]
            values = [min(max(math.exp(x) if log else x, low), high) for x in inner]
        return list(dict.fromkeys(map(round, values) if self.whole and not self.normal else values))


SCALES = ["linear", "uniform", "loguniform", "normal", "lognormal"]
TYPES = ["integer", "int", "float", "double", "discrete", "categorical"]


def parameter(entries: Any, where: str) -> Parameter:
    """Read an entry of `parameters`."""
    section = Section(entries, where)
    kind = section.one_of(TYPES, "type")
    if kind is None:
        raise ConfigError(f"{where}type is missing; it is one of {', '.join(TYPES)}")
    if kind in ("discrete", "categorical"):
        choices = section.take("values", "choices")
        scalar = (bool, int, float, str, type(None)) if kind == "categorical" else (int, float)
        if not isinstance(choices, list) or not choices or not all(isinstance(c, scalar) for c in choices):
            what = "numbers" if kind == "discrete" else "strings, numbers, booleans or null"
            section.refuse(("values", "choices"), choices, f"it is a list of {what}, at least one")
        section.end()
        return Parameter(choices=tuple(dict.fromkeys(choices)))
    whole = kind in ("integer", "int")
    is_log = section.flag("log")
    scale = section.one_of(SCALES, "scalingType", "scaling_type", default="log" if is_log else "linear")
    if is_log and not scale.startswith("log"):
        raise ConfigError(f"{where}got log: true and a scalingType {scale}, which differ; leave one out")
    low, high = (section.number(*names, whole=whole) for names in (("min", "low"), ("max", "high")))
    step = section.number("step", whole=whole, least=1 if whole else None)
    mean, deviation = section.number("mu"), section.number("sigma")
    n_grid = section.number("gridSize", whole=True, least=1)
    section.end()
    log, is_normal = scale.startswith("log"), scale.endswith("normal")
    for names, missing in (("min/low and max/high", low is None or high is None), ("mu and sigma", mean is None)):
        if missing and is_normal == (names == "mu and sigma"):
            raise ConfigError(f"{where}{names} are missing, which a {scale} scale needs")
    if low is not None and high is not None and low > high:
        raise ConfigError(f"{where}got the bounds {low:g} and {high:g}; the first is the smaller one")
    for names, bound in (("min/low", low), ("max/high", high)):
        if log and bound is not None and bound <= 0:
            raise ConfigError(f"{where}{names}: got {bound:g}; on a logarithmic scale it is above 0")
    if is_normal and (deviation is None or deviation <= 0):
        raise ConfigError(f"{where}sigma: got {shown(deviation)}; it is a number above 0")
    if step is not None and (log or is_normal or step <= 0):
        raise ConfigError(f"{where}step: got {step:g}; it is above 0, and goes with a linear scale alone")
    if step is not None and (high - low) / step > STEP_LIMIT:
        raise ConfigError(f"{where}step: got {step:g}; there are more than {STEP_LIMIT:g} values between the bounds")
    if log and is_normal and mean + 6 * deviation > math.log(NUMBER_LIMIT):
        raise ConfigError(
            f"{where}mu and sigma: got {mean:g} and {deviation:g}; there are values above {NUMBER_LIMIT:g}"
        )
    return Parameter((), low, high, whole, log, step, (mean, deviation) if is_normal else None, n_grid)


@dataclass(frozen=True)
class Config:
    """A search.

    Args:
        data: the file's entries, those of `spec` among the others.
        parameters: by name.
        metric: what is optimized.
        maximize: whether more is better.
        n_sets: how many sets of values; 0: as many as there is time for, or a whole grid.
        repeats: how often each is run.
        retries: how often the values of a trial that was killed are run again.
        seed: of the samplers.
        grid: the values of each parameter, if all combinations are to be tried.
        shuffle: whether in random order.
    """

    data: dict[str, Any]
    parameters: dict[str, Parameter]
    metric: str
    maximize: bool
    n_sets: int
    repeats: int
    retries: int
    seed: int | None
    grid: list[list[Any]] | None
    shuffle: bool

    @property
    def total(self) -> int:
        """The number of trials to run; 0: no limit."""
        n = math.prod(map(len, self.grid)) if self.grid else self.n_sets
        return min(n, self.n_sets or n) * self.repeats

    def combinations(self) -> list[dict[str, Any]]:
        """Return the points of the grid."""
        if self.grid is None:
            return []
        points = [dict(zip(self.parameters, each, strict=True)) for each in itertools.product(*self.grid)]
        if self.shuffle:
            random.Random(self.seed or 0).shuffle(points)
        return points

    def sampler(self, number: int) -> Any:
        """Make the sampler that draws a trial.

        Args:
            number: how many trials there were before. Each draws from another random stream, so that two machines with
                one seed do not draw the same values.
        """
        entry = self.data.get("sampler")
        if entry is None:
            entry = "random" if self.grid or self.data.get("algorithm") == "random" else "tpe"
        seed = self.seed
        if seed is not None and "qmc" not in str(entry).lower():  # QMC's sequence continues in the storage.
            seed = zlib.crc32(f"{seed} {number}".encode())
        defaults = {"seed": seed, "multivariate": True, "constant_liar": True}
        return made("sampler", optuna().samplers, entry, defaults)

    def pruner(self) -> Any:
        """Make the pruner."""
        return made(
            "pruner", optuna().pruners, "median" if self.data.get("pruner") is None else self.data["pruner"], {}
        )

    def values(self, drawn: dict[str, Any]) -> dict[str, Any]:
        """Turn the values that Optuna has drawn into those for the script."""
        return {name: parameter.value(drawn[name]) for name, parameter in self.parameters.items()}


NEEDS = {"CmaEsSampler": "cmaes", "GPSampler": "scipy", "QMCSampler": "scipy", "WilcoxonPruner": "scipy"}
"""The packages that Optuna imports only once trials run."""
JSON_TYPES = {
    "int": "a whole number", "float": "a number", "bool": "true or false", "str": "a text", "dict": "an object",
    "None": "null",
}  # fmt: skip
"""The JSON values, in words, for the types of Optuna's options."""


def made(what: str, module: ModuleType, entry: Any, defaults: dict[str, Any]) -> Any:
    """Make a sampler or a pruner of Optuna by its name.

    Args:
        what: 'sampler' or 'pruner'.
        module: where the classes are.
        entry: the name, with or without the suffix, or an object of "name" and options.
        defaults: values for options that the class has and the entry lacks.
    """
    suffix = what.capitalize()
    options = dict(entry) if isinstance(entry, dict) else {}
    name = entry if isinstance(entry, str) else options.pop("name", None)
    # The brute-force sampler ends a search from inside Optuna's own loop; "algorithm": "grid" tries all here.
    left_out = (
        "BaseSampler", "BaseGASampler", "BasePruner", "BruteForceSampler", "GridSampler", "PartialFixedSampler",
    )  # fmt: skip
    classes = {
        cls.removesuffix(suffix).lower(): getattr(module, cls)
        for cls in module.__all__
        if cls.endswith(suffix) and cls not in left_out
    }
    kind = classes.get(str(name).removesuffix(suffix).lower())
    if kind is None:
        names = sorted(cls.__name__ for cls in classes.values())
        raise ConfigError(
            f'{what}: got {shown(entry)}; it is a name or {{"name": ..., options}}, of {", ".join(names)}'
            + did_you_mean(str(name), names)
        )
    allowed = inspect.signature(kind).parameters
    for option, value in options.items():
        if option not in allowed:
            raise ConfigError(
                f"{what}.{option}: {kind.__name__} has no such option; it has {', '.join(allowed)}"
                + did_you_mean(option, allowed)
            )
        annotation = allowed[option].annotation
        types = {part.partition("[")[0] for part in getattr(annotation, "__name__", str(annotation)).split(" | ")}
        given = "None" if value is None else type(value).__name__
        takes = " or ".join(words for name, words in JSON_TYPES.items() if name in types)
        fits = given in types or (given == "int" and "float" in types) or option == "wrapped_pruner"
        if takes and not fits:
            raise ConfigError(f"{what}.{option}: got {shown(value)}; it takes {takes}")
    if "wrapped_pruner" in options:
        options["wrapped_pruner"] = made(what, module, options["wrapped_pruner"], {})
    needed = NEEDS.get(kind.__name__)
    if needed and importlib.util.find_spec(needed) is None:
        raise ConfigError(f"{what}: {kind.__name__} needs {needed}: pip install {needed}")
    options = {option: value for option, value in defaults.items() if option in allowed} | options
    try:
        with warnings.catch_warnings(action="ignore", category=optuna().exceptions.ExperimentalWarning):
            return kind(**options)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{what}: {kind.__name__} refuses these options: {error}") from error


def read_config(path: Path) -> Config:
    """Read a file.

    Raises:
        ConfigError: it cannot be used.
        ImportError: Optuna is not installed.
    """
    data = read_json(path)
    try:
        top = Section(data)
        spec = Section(top.entries.pop("spec", {}), "spec: ")
        if both := top.entries.keys() & spec.entries.keys():
            raise ConfigError(f"{min(both)} is given twice, in spec and beside it; leave one out")
        return make_config(top.entries | spec.entries)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None


def make_config(data: dict[str, Any]) -> Config:
    """Check the entries of a config."""
    check_values(data)
    section = Section(data)
    parameters = {
        name: parameter(entries, f"parameters.{name}: ")
        for name, entries in Section(section.take("parameters", default={}), "parameters: ").entries.items()
    }
    if not parameters:
        raise ConfigError('parameters: there are none; name at least one: {"lr": {"type": "float", ...}}')
    algorithm = section.one_of(["random", "grid", "bayes"], "algorithm")
    sampler = section.take("sampler")
    if algorithm is not None and sampler is not None:
        raise ConfigError("got algorithm and sampler, which mean the same; leave one out")
    metric = section.take("metric", default="loss")
    if not isinstance(metric, str) or not metric or escaped_line(metric) != metric:
        section.refuse(("metric",), metric, "it is the name of what is optimized, such as 'valid_loss'")
    goal = section.one_of(["minimize", "maximize"], "objective", "direction")
    if goal is None and not any(word in metric for word in ("loss", "error")):
        raise ConfigError(f"objective/direction is missing; say whether to minimize or maximize {metric!r}")
    n_sets = section.number("maxCombo", "n_trials", whole=True, least=0, default=0)
    repeats = section.number("trials", whole=True, least=1, default=1)
    assigned = section.number("retryAssignLimit", whole=True, least=0, default=0)
    retries = section.number("retryLimit", whole=True, least=0, default=3)
    seed = section.number("seed", whole=True, least=0)
    size = section.number("gridSize", whole=True, least=1, default=10)
    shuffle = section.flag("randomize")
    section.number("minSampleSize")  # Only Comet's own Bayesian algorithm depends on it.
    section.take("pruner")
    section.take("name")
    section.end()
    is_grid = algorithm == "grid" or str(sampler).lower() in ("grid", "gridsampler")
    grid: list[list[Any]] | None = [] if is_grid else None
    for name, each in parameters.items():
        try:
            each.distribution()
            if grid is not None:
                grid.append(each.grid(size))
        except ValueError as error:
            raise ConfigError(f"parameters.{name}: {error}") from error
    if grid and math.prod(map(len, grid)) > GRID_LIMIT:
        counts = " x ".join(str(len(values)) for values in grid)
        raise ConfigError(f"gridSize: the grid has {counts} points; at most {GRID_LIMIT:,} are allowed: use random")
    if is_grid:
        data = {name: value for name, value in data.items() if name != "sampler"} | {"algorithm": "grid"}
    config = Config(
        data, parameters, metric, goal == "maximize", n_sets, repeats, assigned or retries, seed, grid, shuffle
    )
    config.sampler(0)
    config.pruner()
    return config


FREE = ("maxCombo", "n_trials", "retryLimit", "retryAssignLimit", "name", "minSampleSize")


def changes(before: dict[str, Any], after: dict[str, Any]) -> Iterator[str]:
    """Yield the entries that differ from those with which a search was begun, except those in `FREE`."""
    for name in sorted(before.keys() | after.keys()):
        if before.get(name) != after.get(name) and name not in FREE:
            yield name
