"""examples/serve.py as its reader starts it: many clients, bad input, its end; and what the page does with ONNX."""

import re
import runpy
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

import numpy as np
import psutil
import pytest
from helpers import ROOT
from launching import environment
from pages import NBS, fences
from PIL import Image
from torch import nn

from learnerkit import (
    ImageData,
    Learner,
    TabularData,
    TextClassifier,
    TextData,
    datasets,
    load_learner,
    set_seed,
    tabular_learner,
    vision_learner,
)


class Service:
    """A process of uvicorn with the example, on a free port of loopback."""

    def __init__(self, **settings):
        command = [sys.executable, "-m", "uvicorn", "--app-dir", str(ROOT / "examples"), "serve:app", "--port", "0"]
        self.process = subprocess.Popen(
            command, env=environment() | settings, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        self.printed = []
        for line in self.process.stdout:
            self.printed.append(line)
            if found := re.search(r"running on (http://127.0.0.1:\d+)", line):
                self.address = found[1]
                break
        self.reader = threading.Thread(target=lambda: self.printed.extend(self.process.stdout))
        self.reader.start()

    def end(self, signal_first=True):
        """Ask it to end, as a container is asked, and return its exit code."""
        if signal_first:
            self.process.send_signal(signal.SIGTERM)
        self.reader.join()
        self.process.stdout.close()
        return self.process.wait(60)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """The path of an exported learner of the penguins."""
    set_seed(0)
    data = TabularData.from_df(datasets.penguins(), "species")
    learn = tabular_learner(data.dataloaders(device="cpu"), (20,))
    learn.fit(2, 1e-2)
    return learn.export(tmp_path_factory.mktemp("model") / "penguins.pt2")


def rows():
    frame = datasets.penguins().drop(columns="species").astype(object)
    return frame.where(frame.notna(), None).to_dict("records")


@pytest.mark.soak
def test_twenty_clients_get_the_predictions_for_their_own_inputs(model):
    import httpx

    learn, inputs = load_learner(model, data=TabularData, device="cpu"), rows()
    expected = [learn.predict(row) for row in inputs]
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    service = Service(MODEL=str(model), DATA="TabularData", WAIT="5")

    def ask(client_number):
        with httpx.Client(base_url=service.address, timeout=120) as client:
            assert client.get("/health").status_code == 200
            numbers = [(client_number * 17 + k) % len(inputs) for k in range(30)]
            return [(i, client.post("/predict", json={"input": inputs[i]})) for i in numbers]

    try:
        with ThreadPoolExecutor(20) as pool:
            answers = [answer for found in pool.map(ask, range(20)) for answer in found]
        assert len(answers) == 600
        for i, answer in answers:
            assert answer.status_code == 200, answer.text
            assert answer.json()["label"] == expected[i].label
            assert list(answer.json()["probs"].values()) == pytest.approx(expected[i].probs.tolist(), abs=1e-6)
        bad = {'{"input": {"island": "Dream"}}': "there is no column", '{"input": 3}': "a row is a mapping by column",
               "{": "Expecting property name", "[]": "the body has to be JSON",
               '{"input": ' + "[" * 100_000: "maximum recursion depth"}  # fmt: skip
        for body, words in bad.items():
            answer = httpx.post(f"{service.address}/predict", content=body, timeout=120)
            assert (answer.status_code, words in answer.json()["detail"]) == (422, True), answer.text
    finally:
        code = service.end()
    assert code in (0, -signal.SIGTERM), service.printed
    assert "Finished server process" in service.printed[-1]
    assert {child.pid for child in psutil.Process().children(recursive=True)} == before


@pytest.mark.soak
def test_a_request_that_it_has_is_answered_before_it_ends(model):
    import httpx

    service, row = Service(MODEL=str(model), DATA="TabularData", WAIT="3000"), rows()[0]
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(httpx.post, f"{service.address}/predict", json={"input": row}, timeout=120)
        while httpx.get(f"{service.address}/health", timeout=120).json()["waiting"] == 0:
            time.sleep(0.05)
        service.end()
        assert answer.result().status_code == 200


@pytest.mark.soak
def test_a_service_without_its_model_does_not_start():
    service = Service(MODEL="none.pt2", DATA="TabularData")
    assert service.end(signal_first=False) == 3
    assert "there is no file models/none.pt2" in "".join(service.printed)


@pytest.mark.slow
def test_pictures_are_read_from_the_body_alone_and_points_are_answered_as_lists(monkeypatch):
    from fastapi.testclient import TestClient

    path = datasets.drawn_shapes("shapes", 10) / "images" / "0000.png"
    data = ImageData.from_items([path] * 8, [[[3.0, 4.0]]] * 8, None, targets="points", size=32)
    network = nn.Sequential(nn.Conv2d(3, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 2))
    dls = data.dataloaders(4, num_workers=0, device="cpu")
    learn = vision_learner(dls, network, hidden=(), pretrained=False)
    monkeypatch.setenv("MODEL", str(learn.export("points.pt2")))
    monkeypatch.setenv("DATA", "ImageData")
    with TestClient(runpy.run_path(str(ROOT / "examples" / "serve.py"))["app"]) as client:
        answer = client.post("/predict", content=path.read_bytes())
        assert answer.json()["value"] == learn.predict(path).label.tolist()
        answer = client.post("/predict", json={"input": str(path)})
        assert (answer.status_code, "has to be a picture" in answer.json()["detail"]) == (422, True)


def table_from_onnx(predict):
    set_seed(0)
    frame = datasets.penguins()
    learn = tabular_learner(TabularData.from_df(frame, "species").dataloaders(device="cpu"), (20,))
    learn.fit(1, 1e-2)
    learn.export("penguins.onnx")
    for row in rows()[:20]:
        expected = learn.predict(row).probs.tolist()
        assert list(predict("onnx_table")["predict"](row).values()) == pytest.approx(expected, abs=1e-5)


def texts_from_onnx(predict):
    texts, labels = datasets.chat_lines()
    data = TextData.from_texts(texts, labels, vocab_size=600)
    dls = data.dataloaders(device="cpu")
    learn = Learner(dls, TextClassifier(data.vocab_size, len(data.classes)), nn.CrossEntropyLoss())
    learn.fit(1, 1e-2)
    learn.export("chat.onnx")
    some = [*texts[:40:2], "", "x" * 3000]
    with_onnx = predict("onnx_texts")["predict"]
    assert with_onnx(some) == [one.label for one in learn.predict_many(some)]
    assert with_onnx([""]) == [learn.predict("").label]


def pictures_from_onnx(predict):
    generator = np.random.default_rng(0)
    paths = []
    for number in range(8):  # dark and bright ones of other proportions
        pixels = generator.integers(0, 100, (50, 70, 3)) + 150 * (number % 2)
        paths.append(Path(f"{number}.png"))
        Image.fromarray(pixels.astype(np.uint8)).save(paths[-1])
    dls = ImageData.from_items(paths, ["dark", "bright"] * 4, None, size=(32, 40)).dataloaders(
        bs=4, device="cpu", num_workers=0
    )
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 2))
    learn = Learner(dls, model, nn.CrossEntropyLoss())
    learn.fit(20, 1e-1)
    learn.export("pets.onnx")
    found = [predict("onnx_images")["predict"](path) for path in paths]
    assert found == [learn.predict(path).label for path in paths] == ["dark", "bright"] * 4


@pytest.mark.soak
@pytest.mark.parametrize("check", [table_from_onnx, texts_from_onnx, pictures_from_onnx])
def test_the_page_predicts_from_onnx_without_the_library(check):
    blocks = {fence.caption: fence.code for fence in fences((NBS / "guides" / "serve.md").read_text(encoding="utf-8"))}

    def run(name):
        Path(f"{name}.py").write_text(blocks[f"{name}.py"])
        assert "learnerkit import" not in blocks[f"{name}.py"]
        return runpy.run_path(f"{name}.py")

    check(cache(run))
