"""Serve the predictions of an exported learner over HTTP: requests that come together are predicted in one batch.

    pip install 'learnerkit[serve,tabular]'     # with TextData [serve,text], with ImageData [serve]
    MODEL=models/penguins.pt2 DATA=TabularData uvicorn --app-dir examples serve:app --port 8000

    curl localhost:8000/predict --json '{"input": {"island": "Dream", "sex": "male", ...}}'      # with TextData a text
    curl localhost:8000/predict -H 'Content-Type: image/jpeg' --data-binary @cat.jpg             # with ImageData

MODEL is a '.pt2' file of `learn.export`, and DATA the class that prepares its inputs. BATCH is the most inputs of a
batch (64), and WAIT the milliseconds for which others are waited for (5). `/health` answers once the model has
predicted. SIGTERM and Ctrl+C end the service after the requests that it has.
"""

import asyncio
import io
import os
from contextlib import asynccontextmanager, suppress

import torch
from fastapi import FastAPI, HTTPException, Request

import learnerkit

# What the library raises for an input that it cannot take, and JSON for one that is nested too deeply
BAD_INPUT = (ValueError, TypeError, OSError, RecursionError)


class Batches:
    """Gathers inputs for some milliseconds, and predicts them in one batch in a thread.

    Args:
        learn: the learner.
        size: the most inputs of a batch.
        wait: seconds for which others are waited for, from the first one on.
    """

    def __init__(self, learn, size, wait):
        self.learn, self.size, self.wait = learn, size, wait
        self.queue = asyncio.Queue(maxsize=20 * size)
        self.waiting = 0

    async def predict(self, item):
        """The prediction for one input. Raises asyncio.QueueFull where too many are waiting."""
        answer = asyncio.get_running_loop().create_future()
        self.queue.put_nowait((item, answer))
        self.waiting += 1
        try:
            return await answer
        finally:
            self.waiting -= 1

    async def run(self):
        """Answer inputs, for ever."""
        while True:
            batch = [await self.queue.get()]
            with suppress(TimeoutError):
                async with asyncio.timeout(self.wait):
                    while len(batch) < self.size:
                        batch.append(await self.queue.get())
            found = await asyncio.to_thread(self.predictions, [item for item, _ in batch])
            for (_, answer), prediction in zip(batch, found, strict=True):
                if answer.done():  # the client has left
                    continue
                if isinstance(prediction, Exception):
                    answer.set_exception(prediction)
                else:
                    answer.set_result(prediction)

    def predictions(self, items):
        """The prediction for each input, or the error in its place."""
        try:
            return self.learn.predict_many(items, probs=self.learn.dls.classes is not None)
        except Exception as error:
            return [error] if len(items) == 1 else [self.predictions([item])[0] for item in items]


def example(data):
    """An input to warm up with: a blank picture, a text, or a row of which all is missing."""
    if isinstance(data, learnerkit.ImageData):
        from PIL import Image

        return Image.new("RGB", (8, 8))
    if isinstance(data, learnerkit.TextData):
        return "a text"
    return {column.name: None for column in (*data.cats, *data.conts, *data.dates)}


async def read(request, data):
    """The input that a request has: a picture, or the "input" of JSON, which must not name a file of this machine."""
    if isinstance(data, learnerkit.ImageData):
        from PIL import Image, UnidentifiedImageError

        try:
            return Image.open(io.BytesIO(await request.body()))
        except UnidentifiedImageError:
            raise ValueError("the body has to be a picture: the content of an image file") from None
    body = await request.json()
    if not isinstance(body, dict) or "input" not in body:
        raise ValueError('the body has to be JSON: {"input": ...}')
    return body["input"]


def as_json(value):
    """The value, or the nested list of a tensor, such as points, a mask and several numbers."""
    return value.tolist() if isinstance(value, torch.Tensor) else value


@asynccontextmanager
async def lifespan(app):
    """Load the model and predict once before the first request, and stop after the last one."""
    learn = learnerkit.load_learner(os.environ["MODEL"], data=getattr(learnerkit, os.environ["DATA"]))
    learn.predict(example(learn.dls.data))
    app.state.batches = Batches(learn, int(os.environ.get("BATCH", 64)), float(os.environ.get("WAIT", 5)) / 1000)
    running = asyncio.create_task(app.state.batches.run())
    yield
    running.cancel()


app = FastAPI(lifespan=lifespan)


@app.get("/health")
async def health():
    return {"waiting": app.state.batches.waiting}


@app.post("/predict")
async def predict(request: Request):
    data = app.state.batches.learn.dls.data
    try:
        found = await app.state.batches.predict(await read(request, data))
    except BAD_INPUT as error:
        raise HTTPException(422, str(error)) from error
    except asyncio.QueueFull:
        raise HTTPException(503, "too many requests are waiting; ask again later") from None
    classes = app.state.batches.learn.dls.classes
    if classes is None:
        return {"value": as_json(found.label)}
    return {"label": as_json(found.label), "probs": dict(zip(classes, found.pred.tolist(), strict=True))}
