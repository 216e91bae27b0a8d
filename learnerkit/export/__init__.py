"""Trained models as files that are read without pickle: weights with a record, programs of torch.export, and ONNX.

`facts.py` is the record, `programs.py` makes and reads programs, `writing.py` is `Learner.export`, and `reading.py`
`load_learner`.
"""
