"""Exports on the Hub: what is pushed to a server that speaks its protocol is loaded from there again."""

import base64
import hashlib
import json
import threading
from http.server import ThreadingHTTPServer
from types import SimpleNamespace

import pytest
import torch
from helpers import make_classes, make_dls, make_learner, make_model
from huggingface_hub import close_session, constants
from servers import Handler
from torch import nn

from learnerkit import accuracy, from_hub, push_to_hub
from learnerkit.export.hub import model_card

COMMIT = "0" * 40


class Hub(Handler):
    """As much of the Hub as one repository needs: it is made, takes a commit, and gives files."""

    protocol_version = "HTTP/1.1"

    def answer(self, status, content=b"", **headers):
        content = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        for name, value in {"Content-Length": len(content), **headers}.items():
            self.send_header(name.replace("_", "-"), str(value))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.tokens.append(self.headers["Authorization"])
        if self.path == "/api/repos/create":
            name = "/".join(json.loads(body)[key] for key in ("organization", "name"))
            return self.answer(200, {"url": f"{self.server.address}/{name}", "id": name})
        if self.path == "/api/validate-yaml":
            return self.answer(200, {"errors": [], "warnings": []})
        if "/preupload/" in self.path:
            files = [
                {"path": file["path"], "uploadMode": "regular", "shouldIgnore": False}
                for file in json.loads(body)["files"]
            ]
            return self.answer(200, {"files": files})
        if "/commit/" in self.path:
            for line in map(json.loads, body.splitlines()):
                if line["key"] == "file":
                    self.server.files[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
            return self.answer(
                200, {"commitUrl": f"{self.server.address}/ann/insects/commit/{COMMIT}", "commitOid": COMMIT}
            )
        return self.answer(404)

    def do_GET(self):
        name = self.path.partition("/resolve/main/")[2]
        self.server.read += [name] if name else []  # else what the library asks of any hub
        content = self.server.files.get(name)
        if content is None:
            return self.answer(404, X_Error_Code="EntryNotFound")
        return self.answer(200, content, ETag=f'"{hashlib.sha1(content).hexdigest()}"', X_Repo_Commit=COMMIT)

    do_HEAD = do_GET


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """A hub on loopback, with an empty cache for what is downloaded."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    server.address, server.files, server.tokens, server.read = f"http://127.0.0.1:{server.server_port}", {}, [], []
    monkeypatch.setattr(constants, "ENDPOINT", server.address)
    monkeypatch.setattr(
        constants, "HUGGINGFACE_CO_URL_TEMPLATE", server.address + "/{repo_id}/resolve/{revision}/{filename}"
    )
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield server
    close_session()
    server.shutdown()
    thread.join()
    server.server_close()


def trained():
    dls = make_dls(data=make_classes)
    dls.classes = ["ant", "bee", "cow"]
    learn = make_learner(dls, make_model(n_out=3), nn.CrossEntropyLoss(), metrics=accuracy)
    learn.fit(1)
    return learn


def test_what_is_pushed_is_loaded_from_there(hub):
    learn = trained()
    assert push_to_hub(learn, "ann/insects", token="hf_x") == f"{hub.address}/ann/insects"
    assert set(hub.tokens) == {"Bearer hf_x"}
    card = hub.files["README.md"].decode()
    assert card.startswith("---\nlibrary_name: learnerkit\n")
    assert "| classes | ant, bee, cow |" in card
    assert f"| accuracy | {learn.final_record[2]:.6g} |" in card
    assert "The metrics are those of the last epoch." in card
    assert "learn = from_hub('ann/insects', make_model, fname='model.safetensors')" in card
    other = from_hub("ann/insects", lambda: make_model(n_out=3), device="cpu")
    x = make_classes().tensors[0][0]
    assert other.predict(x).label == learn.predict(x).label
    assert torch.equal(other.predict(x).pred, learn.predict(x).pred)
    assert set(hub.read) == {"model.safetensors"}


@pytest.mark.slow
def test_a_program_of_the_hub_needs_no_code(hub):
    learn = trained()
    push_to_hub(learn, "ann/insects", "insects.pt2")
    assert "learn = from_hub('ann/insects', fname='insects.pt2')" in hub.files["README.md"].decode()
    x = make_classes().tensors[0][0]
    other = from_hub("ann/insects", fname="insects.pt2", device="cpu")
    torch.testing.assert_close(other.predict(x).pred, learn.predict(x).pred)


def test_what_is_no_export_is_not_downloaded(hub, monkeypatch):
    with pytest.raises(ValueError, match="files are pickles"):
        from_hub("ann/insects", fname="model.pkl")
    assert hub.read == []
    with pytest.raises(OSError, match="Entry Not Found"):
        from_hub("ann/insects")
    monkeypatch.setattr("learnerkit.export.hub.find_spec", lambda name: None)
    for call in (lambda: from_hub("ann/insects"), lambda: push_to_hub(make_learner(), "ann/insects")):
        with pytest.raises(ImportError, match=r"pip install 'learnerkit\[hub\]'"):
            call()


def test_the_card_says_how_data_and_onnx_are_loaded():
    learn = make_learner()
    assert "metrics" not in model_card(learn, "ann/a", "a.pt2")
    learn.dls.data = SimpleNamespace()
    assert "from learnerkit import SimpleNamespace, from_hub" in model_card(learn, "ann/a", "a.pt2")
    assert "fname='a.pt2', data=SimpleNamespace)" in model_card(learn, "ann/a", "a.pt2")
    assert 'InferenceSession(hf_hub_download("ann/a", "a.onnx"))' in model_card(learn, "ann/a", "a.onnx")


def test_a_bar_in_a_name_divides_no_cell_of_the_card():
    learn = trained()
    learn.dls.classes = ["a|b", "c"]
    learn.recorder.metric_names[-2] = "recall\nof a|b"
    rows = [line for line in model_card(learn, "ann/a", "a.pt2").splitlines() if line.startswith("|")]
    assert "| classes | a\\|b, c |" in rows
    assert all(row.replace("\\|", "").count("|") == 3 for row in rows)
    assert any(row.startswith("| recall\\nof a\\|b | ") for row in rows)
