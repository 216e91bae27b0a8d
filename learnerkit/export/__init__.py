"""Trained models as files that are read without pickle: weights with a record, programs of torch.export, and ONNX.

`facts.py` is the record, `programs.py` makes and reads programs, `writing.py` is `Learner.export`, `reading.py`
`load_learner`, and `hub.py` takes files to the Hugging Face Hub and back.
"""
