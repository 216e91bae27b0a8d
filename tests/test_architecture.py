"""The architecture: which module imports which, what is not written, the size of rooms and the loop, what is shown."""

import ast
import importlib
import inspect
import io
import re
import subprocess
import sys
import tokenize
import warnings
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path
from textwrap import dedent

import pytest
from collective_calls import Calls, dotted
from helpers import ROOT
from torch.nn import Linear, MSELoss

import learnerkit
from learnerkit.callback import Callback
from learnerkit.events import Event
from learnerkit.state import PublicState

PACKAGE = ROOT / "learnerkit"
FILES = sorted(PACKAGE.rglob("*.py"))
AT_TOP = sorted({*learnerkit.__all__, *learnerkit._UNLISTED})
PUBLIC = {*AT_TOP, *(place.rpartition(".")[2] for place in learnerkit._OLD.values())}

# A part is a folder of the package, or a file at its top. It imports parts of lower layers only: two parts of one layer
# know nothing of each other.
LAYERS = [
    ["marks"],
    ["text", "endings", "state", "torch_internals", "host_scalars", "shards"],
    ["values", "clusters", "stores"],
    ["utils", "files", "events"],
    ["processes"],
    ["launch"],
    ["distributed", "optim"],
    ["callback", "data", "datasets", "large"],
    ["explain"],
    ["gradient_mean", "run_state"],
    ["losses"],
    ["arguments", "metrics"],
    ["callbacks", "parallel"],
    ["checkpoints", "inspection"],
    ["scaling", "loggers"],
    ["export", "notebook", "preflight", "sweep"],
    ["learner", "doctor"],
    ["images", "language", "tabular", "vision", "world", "__init__", "__main__"],
]

# A worker runs the user's own script as `__main__`; nothing else is run as code.
RUNS_CODE = {"processes.rank_main": 1}

# A notebook's kernel and the workers it has started read what they write to each other, code of cells included; nobody
# else reads, or can write, those files. Nothing else is read that runs what it says.
TRUSTS = "notebook.pickling"

# Imported where they are used, because they are slow to import or may not be installed.
HEAVY = {
    "torchvision", "matplotlib", "IPython", "torchmetrics", "torcheval", "cloudpickle", "pandas", "PIL", "optuna",
    "onnx", "onnxscript", "onnxruntime", "tensorboard", "wandb", "comet_ml", "mlflow", "trackio", "tokenizers",
    "transformers", "timm", "huggingface_hub", "fsspec", "s3fs",
}  # fmt: skip


def name_of(path):
    """The dotted name of a module within the package."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1]) if parts[-1] == "__init__" and len(parts) > 1 else ".".join(parts)


@cache
def modules():
    """The syntax tree of each module by its name."""
    return {name_of(path): ast.parse(path.read_text(encoding="utf-8"), str(path)) for path in FILES}


@cache
def nodes_of(name):
    """All nodes of a module's syntax tree."""
    return list(ast.walk(modules()[name]))


def layer(name):
    """The layer of a module, by itself or its folder."""
    top = name.split(".")[0]
    return next((number for number, parts in enumerate(LAYERS) if top in parts), None)


def for_checkers_only(name):
    """The nodes under `if TYPE_CHECKING:`, which no running program imports."""
    found = set()
    for node in nodes_of(name):
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            found |= {id(child) for part in node.body for child in ast.walk(part)}
    return found


@cache
def imported(name, everywhere=True):
    """(module, name) of each import statement of a module; `everywhere`: inside functions too."""
    skipped, found = for_checkers_only(name), []
    for node in nodes_of(name) if everywhere else modules()[name].body:
        if id(node) in skipped:
            continue
        if isinstance(node, ast.Import):
            found += [(alias.name, None) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are written from the top, not relative"
            found += [(node.module, alias.name) for alias in node.names]
    return found


@cache
def own_imports(name):
    """The modules of the package that a module imports."""
    found = set()
    for module, attribute in imported(name):
        if module.split(".")[0] != "learnerkit":
            continue
        inner = module.removeprefix("learnerkit").removeprefix(".")
        longer = f"{inner}.{attribute}".removeprefix(".")
        if longer in modules():
            found.add(longer)
        elif inner:
            found.add(inner)
        elif attribute != "__version__":  # which stands above all imports
            found.add("__init__")
    return found


def test_every_module_has_its_layer():
    assert [name for name in modules() if layer(name) is None] == []
    assert {
        "learner",
        "callback",
        "callbacks.recorder",
        "parallel",
        "parallel.distributed",
        "distributed",
    } <= modules().keys()


def test_imports_point_downward():
    for name in modules():
        others = {other for other in own_imports(name) if other.split(".")[0] != name.split(".")[0]}
        assert [other for other in others if layer(other) >= layer(name)] == [], name
        assert own_imports(name) <= modules().keys(), name


def test_no_two_modules_need_each_other():
    graph = {name: own_imports(name) - {name} for name in modules()}
    assert list(TopologicalSorter(graph).static_order())


def test_the_check_of_imports_sees_what_it_should():
    assert {"callback", "arguments", "callbacks.recorder", "data.loaders", "parallel", "distributed"} <= own_imports(
        "learner"
    )
    assert "learner" not in own_imports("callback")  # there it is for type checkers alone


def test_the_lower_layers_know_torch_and_the_standard_library_alone():
    allowed = set(sys.stdlib_module_names) | {"torch", "fsspec", "numpy", "safetensors", "learnerkit"}  # torch needs it
    for name in (name for name in modules() if layer(name) <= layer("distributed")):
        assert {module.split(".")[0] for module, _ in imported(name)} <= allowed, name


def test_the_launcher_knows_the_standard_library_alone_but_to_meet_other_machines():
    for name in (name for name in modules() if name.split(".")[0] in ("launch", "text")):
        found = {module.split(".")[0] for module, _ in imported(name, everywhere=False)}
        assert found <= set(sys.stdlib_module_names) | {"learnerkit"}, name


def test_the_top_has_few_files():
    files = {path.stem for path in PACKAGE.glob("[!_]*.py")}
    assert len(files - {"world"}) <= 20, "`world` is another name of a folder"


def test_the_heavy_is_imported_where_it_is_used():
    for name in modules():
        assert {module.split(".")[0] for module, _ in imported(name, everywhere=False)} & HEAVY == set(), name


def test_no_module_imports_by_a_star_or_reads_files_that_run_code():
    for name in modules():
        for module, attribute in imported(name):
            assert attribute != "*", name
            runs_files = module.split(".")[0] in ("pickle", "cloudpickle", "dill", "shelve", "marshal")
            assert not runs_files or name == TRUSTS, f"{name}: {module} runs what a file says"


def calls_of(name):
    """Each call that a module makes, and the name of what it calls."""
    return [(node, dotted(node.func)) for node in nodes_of(name) if isinstance(node, ast.Call)]


def test_no_text_is_run_as_code_and_no_shell_is_started():
    for name in modules():
        running = 0
        for node, called in calls_of(name):
            options = {keyword.arg: keyword.value for keyword in node.keywords}
            running += called in ("eval", "exec")
            if called == "torch.load":
                assert ast.unparse(options["weights_only"]) == "True", (name, ast.unparse(node))
            if called.startswith("subprocess."):
                assert "shell" not in options, (name, ast.unparse(node))
            assert called not in ("os.system", "os.popen"), name
        assert running == RUNS_CODE.get(name, 0), f"{name}: eval or exec"


# They read what somebody else may have written.
READERS = [
    "files", "checkpoints.storage", "export.facts", "export.programs", "export.reading",
]  # fmt: skip


@pytest.mark.parametrize("name", READERS)
def test_no_name_from_a_file_is_looked_up_and_nothing_is_unpickled(name):
    loads = {"torch.load", "json.loads", "learn.load"}
    for node in (node for node in nodes_of(name) if isinstance(node, ast.Call)):
        called = ast.unparse(node.func)
        assert called.split(".")[-1] not in ("load", "loads", "import_module", "__import__") or called in loads, called
        assert called not in ("globals", "exec", "eval", "compile", "setattr"), called
        if called == "getattr":
            assert isinstance(node.args[1], ast.Constant), ast.unparse(node)
        assert "globals" not in called, f"{called}: an allowlist of torch's holds for the whole process"


OTHERS = ("torch", "nn", "dist", "F", "sys", "threading", "atexit", "runpy", "IPython", "multiprocessing")


# It is run by its path, and can import nothing of this package.
PRIVATE = {"processes.rank_main": ["threading._shutdown", "atexit._run_exitfuncs"]}


def is_private(name):
    """Tell whether a name begins with one underscore."""
    return name.startswith("_") and not name.startswith("__")


def test_private_names_of_others_stand_in_one_module():
    for name in modules().keys() - {"torch_internals"}:
        for module, attribute in imported(name):
            ours = module.startswith("learnerkit")
            assert ours or not is_private(attribute or ""), f"{name}: from {module} import {attribute}"
        for node in nodes_of(name):
            if isinstance(node, ast.Attribute) and is_private(node.attr):
                known = ast.unparse(node) in PRIVATE.get(name, [])
                assert ast.unparse(node).split(".")[0] not in OTHERS or known, (name, ast.unparse(node))


def test_no_class_of_torch_is_patched():
    for name in modules():
        for node in (node for node in nodes_of(name) if isinstance(node, ast.Assign)):
            targets = [dotted(target) for target in node.targets if isinstance(target, ast.Attribute)]
            patched = [target for target in targets if target.startswith(("torch.", "nn.", "dist.", "F."))]
            assert [target for target in patched if not target.startswith("torch.backends.")] == [], name


# Collectives

LEARNER = "learner", "Learner"


@pytest.mark.slow
def test_who_calls_a_collective_is_one_or_says_why_not():
    """Mark it by `@collective`, or give the reason by `@not_collective("why")`.

    A function counts as a caller if it names a collective, also within its own functions and to hand it on. Seen are
    functions by their names and modules, methods by `self`, `super()`, a class, or `learn`, and their overrides. Of
    other objects only a method is seen whose name nothing else has. So an event, a hook that is already in place, a
    property of another object, and what was handed on are not.
    """
    calls = Calls(modules(), known={"learn": LEARNER, "self.learn": LEARNER})
    assert calls.unmarked() == {}
    assert calls.without_need() == [], "these call no collective"


RANKS = """
@collective
def barrier(): ...

def rank(): ...
"""

CALLERS = """
import torch.distributed as dist
from learnerkit import ranks
from learnerkit.ranks import barrier as wait

def calls(): ranks.barrier()

def calls_by_another_name(): wait()

def calls_within():
    return lambda: wait()

def hands_on(run): run(ranks.barrier)

def calls_one_of_torch(x): dist.all_reduce(x)

def is_plain(): ranks.rank()

def has_a_variable(wait): wait()

@collective
def is_marked(): wait()

@not_collective("alone")
def is_excused(): wait()

def calls_excused(): is_excused()

@not_collective("alone")
def has_no_need(): ranks.rank()

class Base:
    def calls_an_override(self): self.meet()

    def meet(self): ...

    @collective
    def wait_for_all(self): ...

class Child(Base):
    @collective
    def meet(self): super().meet()

    def calls_by_self(self): self.wait_for_all()

    @property
    @collective
    def everyone(self): ...

    def reads(self): return self.everyone

class Enters:
    @collective
    def __enter__(self): ...

def enters():
    with Enters(): ...

def calls_of_another(x): x.wait_for_all()

def calls_a_common_name(x): x.meet()

def saves(learn): learn.save()

def saves_another(file): file.save()

class Learner:
    @collective
    def save(self): ...
"""


def test_a_call_of_a_collective_is_seen():
    trees = {"ranks": ast.parse(RANKS), "callers": ast.parse(CALLERS)}
    calls = Calls(trees, known={"learn": ("callers", "Learner")})
    assert calls.unmarked() == {
        "callers.calls": ["ranks.barrier"],
        "callers.calls_by_another_name": ["ranks.barrier"],
        "callers.calls_within": ["ranks.barrier"],
        "callers.hands_on": ["ranks.barrier"],
        "callers.calls_one_of_torch": ["dist.all_reduce"],
        "callers.Base.calls_an_override": ["callers.Child.meet"],
        "callers.Child.calls_by_self": ["callers.Base.wait_for_all"],
        "callers.Child.reads": ["callers.Child.everyone"],
        "callers.enters": ["callers.Enters.__enter__"],
        "callers.calls_of_another": ["callers.Base.wait_for_all"],
        "callers.saves": ["callers.Learner.save"],
    }
    assert calls.without_need() == ["callers.has_no_need"]


def classes():
    """Every class of the package: its name, its methods and whether each does something, and its bases here."""
    found = {
        node.name: node for tree in modules().values() for node in tree.body if isinstance(node, ast.ClassDef)
    }  # fmt: skip
    for name, node in found.items():
        functions = [n for n in node.body if isinstance(n, ast.FunctionDef) and not n.name.startswith("__")]
        methods = {n.name: any(not isinstance(part, ast.Expr | ast.Raise) for part in n.body) for n in functions}
        bases = [ast.unparse(base) for base in node.bases]
        yield name, methods, [base for base in bases if base in found]


def test_no_class_overrides_more_than_it_adds():
    table = {name: (methods, bases) for name, methods, bases in classes()}
    assert {"RankStep", "RankDispatch", "RankStreamLoader", "LRFinder"} <= table.keys()

    def inherited(name):
        for base in table[name][1]:
            if base not in PUBLIC:  # those are made to be overridden
                yield from (method for method, works in table[base][0].items() if works)
                yield from inherited(base)

    for name, (own, _) in table.items():
        over = own.keys() & set(inherited(name)) - set(Event)  # hooks call those of their base
        assert len(over) <= max(1, len(own.keys() - over)), (name, over)


# Rooms


QUIET = {
    tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER,
}  # fmt: skip


def code_tokens(source):
    """The number of tokens of code: no comments, docstrings, ends of lines or indentation."""
    nodes = [n for n in ast.walk(ast.parse(source)) if isinstance(n, ast.Module | ast.ClassDef | ast.FunctionDef)]
    first = [n.body[0].value for n in nodes if n.body and isinstance(n.body[0], ast.Expr)]
    docstrings = {n.lineno for n in first if isinstance(n, ast.Constant) and isinstance(n.value, str)}
    count = depth = 0
    for t in tokenize.generate_tokens(io.StringIO(source).readline):
        name = tokenize.tok_name[t.type]
        depth -= name == "FSTRING_END"  # from Python 3.12 on an f-string has tokens inside it, which are not counted
        is_docstring = t.type == tokenize.STRING and t.start[0] in docstrings
        count += t.type not in QUIET and not is_docstring and not depth and name != "FSTRING_END"
        depth += name == "FSTRING_START"
    return count


def test_code_tokens_are_counted_right():
    source = 'def f(x):\n    "A docstring."\n\n    # a comment\n    y = """two\nlines"""  # and another\n    return y\n'
    assert code_tokens(source) == len(["def", "f", "(", "x", ")", ":", "y", "=", "two lines", "return", "y"])
    assert code_tokens("x = [\n    1,\n    2,\n]\n") == code_tokens("x = [1, 2,]")
    assert code_tokens("x = f'{a + b:{c}} {f(\"d\")}', 1\n") == len(["x", "=", "f''", ",", "1"])


# The most tokens of code that each room may have; a room is a folder of the package, or a file at its top. A budget is
# raised by at most a tenth. More needs a line in the changelog that says why.
BUDGETS = {
    "callbacks": 42_061, "parallel": 27_523, "data": 21_960, "scaling": 16_684, "preflight": 18_163, "sweep": 11_512,
    "launch": 14_721, "checkpoints": 13_781, "learner": 10_713, "inspection": 9_125, "metrics": 9_943,
    "loggers": 8_100, "images": 8_229, "optim": 8_509, "notebook": 7_725, "tabular": 7_562, "export": 7_053,
    "losses": 7_152, "distributed": 6_549, "vision": 5_300, "run_state": 5_835, "language": 4_593, "processes": 4_997,
    "files": 4_505, "torch_internals": 4_090, "explain": 3_873, "utils": 2_396, "values": 1_529, "large": 2_548,
    "callback": 2_464, "clusters": 4_033, "arguments": 2_489, "__init__": 1_659, "datasets": 1_375, "shards": 842,
    "text": 762, "gradient_mean": 885, "endings": 584, "host_scalars": 898, "state": 531, "__main__": 290,
    "events": 232, "marks": 61, "doctor": 23, "world": 14, "stores": 1_671,
}  # fmt: skip


def room_sizes():
    """The tokens of code in each room."""
    sizes = dict.fromkeys(sorted({path.relative_to(PACKAGE).with_suffix("").parts[0] for path in FILES}), 0)
    for path in FILES:
        sizes[path.relative_to(PACKAGE).with_suffix("").parts[0]] += code_tokens(path.read_text(encoding="utf-8"))
    return sizes


def over_budget(sizes, budgets):
    """What is said of each room that has more tokens than its budget."""
    return [
        f"room {room} has {size:,} tokens, budget {budgets[room]:,}: make it smaller, or raise the budget by at most a "
        "tenth; more needs a line in the changelog that says why"
        for room, size in sizes.items()
        if size > budgets[room]
    ]


@pytest.mark.slow
def test_each_room_keeps_to_its_budget():
    sizes = room_sizes()
    assert sizes.keys() == BUDGETS.keys()
    assert over_budget(sizes, BUDGETS) == []


def test_a_room_over_its_budget_is_named():
    (said,) = over_budget({"data": 1101, "text": 5}, {"data": 1100, "text": 5})
    assert said.startswith("room data has 1,101 tokens, budget 1,100: make it smaller, or raise the budget by at most")


# The loop


@cache
def learner_methods():
    """The source of each method of the Learner, in order."""
    lines = (PACKAGE / "learner.py").read_text(encoding="utf-8").splitlines()
    (learner,) = (n for n in modules()["learner"].body if isinstance(n, ast.ClassDef) and n.name == "Learner")
    functions = [n for n in learner.body if isinstance(n, ast.FunctionDef)]
    return {n.name: dedent("\n".join(lines[n.lineno - 1 : n.end_lineno])) for n in functions}


SEAMS = ("_forward", "_loss", "_backward", "_step", "_zero_grad")


def reached(found, first):
    """The methods that the first one calls by `self`, they themselves call, and so on."""
    names = [first]
    for name in names:  # which grows
        tree = ast.parse(found[name])
        calls = [n.attr for n in ast.walk(tree) if isinstance(n, ast.Attribute) and ast.unparse(n.value) == "self"]
        names += dict.fromkeys(call for call in calls if call in found and call not in names)
    return names


def test_the_loop_fits_on_one_screen():
    found = learner_methods()
    loop = reached(found, "_fit")
    assert {"_one_epoch", "_all_batches", "_one_batch", "_do_batch", "_level", "_events", "_step"} <= set(loop)
    sizes = {name: code_tokens(found[name]) for name in loop if name not in SEAMS}
    assert sum(sizes.values()) <= 780, sizes
    assert {name: size for name, size in sizes.items() if size > 160} == {}


def test_each_seam_is_short():
    found = learner_methods()
    for seam in (*SEAMS, "create_opt"):
        assert code_tokens(found[seam]) <= 110, seam


# The package


def test_every_public_name_is_there_and_listed():
    assert learnerkit.__all__ == sorted(set(learnerkit.__all__))
    assert set(learnerkit.__all__) <= set(dir(learnerkit))
    for name in learnerkit.__all__:
        assert getattr(learnerkit, name) is not None
    for cancel in (name for name in vars(sys.modules["learnerkit.events"]) if name.startswith("Cancel")):
        assert cancel in learnerkit.__all__ or cancel == "CancelException"
    with pytest.raises(AttributeError, match="module 'learnerkit' has no attribute 'Lerner'; did you mean 'Learner'"):
        learnerkit.Lerner  # noqa: B018


def test_the_top_level_is_short():
    assert len(learnerkit.__all__) <= 85
    assert not learnerkit._UNLISTED & {*learnerkit.__all__}


def place_of(old):
    """What an old name stands for, by the place that it warns of."""
    home, _, name = f"learnerkit.{learnerkit._OLD[old]}".rpartition(".")
    return getattr(importlib.import_module(home), name)


@pytest.mark.parametrize("name", learnerkit._OLD)
def test_an_old_name_is_the_same_object_and_says_the_new_one(name):
    said = f"learnerkit.{name} is learnerkit.{learnerkit._OLD[name]} since 0.2.0; the old name goes in 0.3.0"
    for _ in range(2):  # not only the first time
        with pytest.warns(FutureWarning, match=f"^{re.escape(said)}$") as warned:
            assert getattr(learnerkit, name) is place_of(name)
        assert [w.filename for w in warned] == [__file__]
    assert name not in {*AT_TOP, *dir(learnerkit)}
    with pytest.warns(FutureWarning, match=re.escape(said)) as warned:
        exec(f"from learnerkit import {name}", {})
    assert {w.filename for w in warned} == {"<string>"}


def test_the_last_version_with_old_names_has_not_come():
    assert tuple(map(int, learnerkit.__version__.split(".")[:2])) < (0, 3), "_OLD goes"


CONTRACT = """
Learner DataLoaders Callback CancelBatchException CancelBackwardException CancelStepException CancelTrainException
CancelValidException CancelEpochException CancelFitException Recorder AccumMetric Metric accuracy error_rate
top_k_accuracy mse mae rmse perplexity ParallelCallback DistributedCallback set_seed rank0_first on_rank0 world
distributed GradientAccumulation CheckpointCallback CheckpointError ScalingReport GradientNoiseScale ScalingMonitor
scaled_lr sweep CSVLogger JSONLogger TensorBoardCallback WandbCallback CometCallback MLflowCallback MixUp CutMix
BatchTransform EMA SWA Hook Hooks ActivationStats ClassificationInterpretation load_learner TabularData TabularModel
tabular_learner TextData TextClassifier ImageData vision_learner ActivationCheckpointing SplitBatch text_learner
unet_learner TrackioCallback ShowGraphCallback MCDropout accuracy_multi
"""
"""Names that stay at the top."""


def test_a_name_that_stays_is_found_without_a_warning():
    assert {*CONTRACT.split()} & {*learnerkit._OLD} == set()
    with warnings.catch_warnings(action="error"):
        assert [name for name in CONTRACT.split() if getattr(learnerkit, name) is None] == []


WITH_SUFFIX = {
    "fastai": {
        "EarlyStoppingCallback", "ProgressCallback", "SaveModelCallback", "ShortEpochCallback", "ShowGraphCallback",
        "TerminateOnNaNCallback", "TrackerCallback", "TrainEvalCallback",
    },
    "trackers": {"CometCallback", "MLflowCallback", "TensorBoardCallback", "TrackioCallback", "WandbCallback"},
    "our own": {"CheckpointCallback", "DataParallelCallback", "DistributedCallback"},
}  # fmt: skip


def test_a_callback_is_named_for_what_it_does():
    named = {
        node.name for module in modules() for node in nodes_of(module)
        if isinstance(node, ast.ClassDef) and node.name.endswith("Callback") and node.name != "Callback"
    }  # fmt: skip
    assert named == set().union(*WITH_SUFFIX.values())
    assert learnerkit.ParallelCallback is learnerkit.DataParallelCallback
    assert learnerkit.DataParallelCallback().name == "parallel"


NAMES = {"Trainer": "here it is Learner", "Leaner": "did you mean 'Learner'", "Accuracy": "did you mean 'accuracy'"}


@pytest.mark.parametrize("name", NAMES)
def test_a_name_of_another_library_or_a_misspelled_one_is_told(name):
    with pytest.raises(ImportError, match=f"cannot import name '{name}' from 'learnerkit'; {NAMES[name]}"):
        __import__("learnerkit", fromlist=[name])
    assert not hasattr(learnerkit, name)


def test_names_of_other_libraries_lead_to_names_that_are_here():
    assert {name.partition(".")[0] for name in learnerkit._ELSEWHERE.values()} <= set(learnerkit.__all__)
    assert not learnerkit._ELSEWHERE.keys() & set(learnerkit.__all__)


def test_an_unknown_name_and_a_module_are_imported_as_python_does():
    with pytest.raises(ImportError, match="cannot import name 'xyz' from 'learnerkit'"):
        from learnerkit import xyz  # noqa: F401
    from learnerkit import callbacks  # whose name resembles a public one

    assert callbacks.__name__ == "learnerkit.callbacks"


def test_type_checkers_see_the_same_names():
    (block,) = (
        n for n in modules()["__init__"].body if isinstance(n, ast.If) and ast.unparse(n.test) == "TYPE_CHECKING"
    )
    found = {alias.asname or alias.name for node in block.body for alias in node.names}
    assert found == {*AT_TOP}


def declared(block):
    """The names that are annotated in a block, with their types, and those of its properties."""
    found = {node.target.id: ast.unparse(node.annotation) for node in block if isinstance(node, ast.AnnAssign)}
    return found | {node.name: ast.unparse(node.returns) for node in block if isinstance(node, ast.FunctionDef)}


def test_the_learners_private_names_that_others_use_are_few_and_declared():
    (state,) = (n for n in ast.walk(modules()["state"]) if isinstance(n, ast.ClassDef) and n.name == "RunState")
    (block,) = (n.body for n in state.body if isinstance(n, ast.If))
    used = [
        node.attr
        for name in modules()
        for node in nodes_of(name)
        if name not in ("learner", "state") and isinstance(node, ast.Attribute) and re.match(r"_[a-z]", node.attr)
        and ast.unparse(node.value) in ("learn", "self.learn", "cb.learn")
    ]  # fmt: skip
    assert {*used} - {*declared(state.body), *declared(block)} == set()
    assert len({*used}) <= 20
    assert len(used) <= 120


def test_type_checkers_know_a_learners_callbacks_by_their_names():
    (learner,) = (n for n in modules()["learner"].body if isinstance(n, ast.ClassDef) and n.name == "Learner")
    (block,) = (n.body for n in learner.body if isinstance(n, ast.If))
    things = [getattr(learnerkit, name) for name in learnerkit.__all__] + [place_of(name) for name in learnerkit._OLD]
    kinds = [kind for kind in things if inspect.isclass(kind) and issubclass(kind, Callback) and kind is not Callback]
    names = {kind.name.fget(kind.__new__(kind)): kind.__name__ for kind in kinds}
    types = {name: annotation.removeprefix("lk.") for name, annotation in declared(block).items()}
    assert types | {"recorder": "Recorder"} == names


def test_type_checkers_know_what_a_callback_reads_of_its_learner():
    (block,) = (n for n in ast.walk(modules()["callback"]) if isinstance(n, ast.ClassDef) and n.name == "_Read")
    learn = learnerkit.Learner(learnerkit.DataLoaders([1]), Linear(1, 1), MSELoss())
    known = {*vars(learn), *(name for name, _ in inspect.getmembers(learnerkit.Learner, inspect.isdatadescriptor))}
    known -= {cb.name for cb in learn.cbs} - {"recorder"}
    public = {name for name in known if not name.startswith("_")}
    assert {*declared(block.body), *PublicState.__annotations__} == public


def test_every_public_name_is_documented():
    for name in AT_TOP:
        thing = getattr(learnerkit, name)
        assert (inspect.getdoc(thing) or "").strip(), name
        if inspect.isclass(thing):
            assert vars(thing).get("__doc__"), f"{name} inherits its docstring"
            for attribute, value in vars(thing).items():
                if attribute.startswith("_") or attribute in list(Event) or not inspect.isfunction(value):
                    continue
                assert inspect.getdoc(value), f"{name}.{attribute}"


def test_every_module_says_what_it_is_for():
    assert [name for name, tree in modules().items() if not ast.get_docstring(tree)] == []


WITHOUT_TORCH = ["", ".__main__", ".launch", ".doctor", ".sweep", ".sweep.cli; learnerkit.sweep.params(lr=1)"]


@pytest.mark.parametrize("module", WITHOUT_TORCH)
def test_importing_needs_no_torch(module, script_env):
    heavy = {"torch", "fastcore", "optuna", "pandas", "matplotlib", *(() if "cli" in module else ("numpy", "tqdm"))}
    code = f"import sys, learnerkit{module}; print(sorted({heavy} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=script_env, timeout=60)
    assert (done.stdout.strip(), done.stderr) == ("[]", "")


@pytest.mark.slow
def test_importing_everything_asks_for_no_device_and_imports_nothing_heavy(script_env):
    code = """
import sys, torch
def refuse(*args, **kwargs):
    raise AssertionError("asked at import")
torch.cuda.is_available = torch.accelerator.is_available = torch.accelerator.current_accelerator = refuse
torch.cuda.device_count = refuse
from learnerkit import *
import learnerkit.learner, learnerkit.parallel
heavy = ("torchvision", "matplotlib", "IPython", "torchmetrics", "pandas", "cloudpickle", "optuna")
heavy += ("tensorboard", "wandb", "comet_ml", "mlflow")
print([m for m in heavy if m in sys.modules], torch.distributed.is_initialized())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=script_env, timeout=60)
    assert (done.stdout.strip(), done.stderr) == ("[] False", "")


def test_the_packages_files_are_its_own():
    assert Path(learnerkit.__file__).parent == PACKAGE


def test_the_table_of_callback_orders_is_right():
    found, stack = {}, [Callback]
    for name in modules():
        if not name.endswith("__"):  # not __init__ and __main__
            importlib.import_module(f"learnerkit.{name}")
    while stack:
        own = [cls for cls in stack.pop().__subclasses__() if cls.__module__.startswith("learnerkit.")]
        stack += own
        for cls in own:
            is_base = any(kind.__module__.startswith("learnerkit.") for kind in cls.__subclasses__())
            is_only_base = is_base and (cls.__name__[0] == "_" or "order" not in vars(cls))
            found |= {} if is_only_base else {cls.__name__: cls.order}
    rows = re.findall(r"^ +(-?\d+)  ([\w, ]+): \w", learnerkit.callbacks.__doc__, re.MULTILINE)
    assert {name: int(order) for order, names in rows for name in names.split(", ")} == found


EXAMPLES = {
    "train_images": 480,
    "train_replay": 1_110,
    "train_ray": 660,
    "train_text": 350,
    "train_tabular": 360,
    "train_transformer": 610,
    "train_segmentation": 630,
    "image_targets": 520,
}
"""The most tokens of code of each."""


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_is_read_at_a_glance(name):
    assert code_tokens((ROOT / "examples" / f"{name}.py").read_text(encoding="utf-8")) <= EXAMPLES[name]
