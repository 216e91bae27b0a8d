"""600 requests of 20 clients to a service by hand and to examples/serve.py, in turns, as JSON; see run.py.

The seconds of each round, and the processor time of each service in all rounds.
"""

import http.client
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
from run import HERE, take_turns
from torch import nn

from learnerkit import Learner, TextClassifier, TextData, set_seed
from learnerkit.datasets import chat_lines
from learnerkit.export.facts import facts_of

CLIENTS, REQUESTS = 20, 30


def start(app, folder, settings):
    """Start a service; give its process and its port."""
    command = [sys.executable, "-m", "uvicorn", "--app-dir", str(folder), app, "--port", "0", "--no-access-log"]
    process = subprocess.Popen(command, env=os.environ | settings, stderr=subprocess.PIPE, text=True)
    said = []
    for line in process.stderr:
        said.append(line)
        if found := re.search(r"running on http://127.0.0.1:(\d+)", line):
            return process, int(found[1])
    raise RuntimeError("".join(said))


def seconds(port, texts):
    """How long the clients need, each for its requests one after the other, on one connection."""

    def ask(number):
        connection = http.client.HTTPConnection("127.0.0.1", port)
        for k in range(REQUESTS):
            body = json.dumps({"input": texts[(number * 31 + k) % len(texts)]})
            connection.request("POST", "/predict", body, {"Content-Type": "application/json"})
            answer = connection.getresponse()
            content = answer.read()
            if answer.status != 200:
                raise RuntimeError(content.decode())
        connection.close()

    begin = time.perf_counter()
    with ThreadPoolExecutor(CLIENTS) as pool:
        list(pool.map(ask, range(CLIENTS)))
    return time.perf_counter() - begin


def processor_time(process):
    """Seconds of processor time of a service so far."""
    return sum(psutil.Process(process.pid).cpu_times()[:2])


def main(rounds):
    """Print what was measured."""
    set_seed(0)
    texts, labels = chat_lines()
    data = TextData.from_texts(texts, labels, vocab_size=1000)
    model = TextClassifier(data.vocab_size, len(data.classes))
    learn = Learner(data.dataloaders(tokens=1024, device="cpu"), model, nn.CrossEntropyLoss())
    with tempfile.TemporaryDirectory() as folder:
        path, facts = learn.export(Path(folder) / "chat.pt2"), Path(folder) / "facts.json"
        facts.write_text(facts_of(learn).as_json())
        settings = {"MODEL": str(path), "DATA": "TextData", "FACTS": str(facts)}
        services = []
        try:
            for app, where in (("serve_by_hand:app", HERE), ("serve:app", HERE.parents[1] / "examples")):
                services.append(start(app, where, settings))
            before = [processor_time(process) for process, _ in services]
            found = take_turns(rounds, *(lambda port=port: seconds(port, texts) for _, port in services))
            spent = [processor_time(process) - start for (process, _), start in zip(services, before, strict=True)]
        finally:
            for process, _ in services:
                process.terminate()
                process.communicate()
    print(json.dumps({"rounds": found, "processor": spent}))


if __name__ == "__main__":
    main(int(sys.argv[1]))
