"""A service written by hand for the texts of serve.py: the same model and gathering, and nothing of learnerkit's."""

import asyncio
import json
import os
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import torch
from fastapi import FastAPI, HTTPException, Request
from tokenizers import Tokenizer

SIZE, WAIT = 64, 0.005
queue = asyncio.Queue(maxsize=20 * SIZE)
facts = json.loads(Path(os.environ["FACTS"]).read_text())
tokenizer = Tokenizer.from_str(facts["preprocessing"]["codec"]["tokenizer"])
tokenizer.enable_truncation(facts["preprocessing"]["codec"]["max_len"])
tokenizer.enable_padding(pad_id=facts["preprocessing"]["codec"]["pad"])
program = torch.export.load(os.environ["MODEL"]).module()


def predict_batch(texts):
    encoded = tokenizer.encode_batch_fast(texts)
    ids = torch.tensor([each.ids for each in encoded])
    mask = torch.tensor([each.attention_mask for each in encoded])
    with torch.no_grad():
        probs = program(input_ids=ids, attention_mask=mask).softmax(1)
    return list(zip(probs.argmax(1).tolist(), probs.tolist(), strict=True))


async def run():
    while True:
        batch = [await queue.get()]
        with suppress(TimeoutError):
            async with asyncio.timeout(WAIT):
                while len(batch) < SIZE:
                    batch.append(await queue.get())
        found = await asyncio.to_thread(predict_batch, [text for text, _ in batch])
        for (_, answer), prediction in zip(batch, found, strict=True):
            if not answer.done():
                answer.set_result(prediction)


@asynccontextmanager
async def lifespan(app):
    predict_batch(["a text"])
    running = asyncio.create_task(run())
    yield
    running.cancel()


app = FastAPI(lifespan=lifespan)


@app.post("/predict")
async def predict(request: Request):
    text = (await request.json()).get("input")
    if not isinstance(text, str):
        raise HTTPException(422, "send a text")
    answer = asyncio.get_running_loop().create_future()
    queue.put_nowait((text, answer))
    number, probs = await answer
    return {"label": facts["classes"][number], "probs": dict(zip(facts["classes"], probs, strict=True))}
