"""Texts: token ids by any Hugging Face tokenizer, batches of a token budget, and a small classifier.

`codec.py` turns texts into token ids and back, `batches.py` makes batches of them, `data.py` is what a user calls, and
`models.py` has the classifier. Models of transformers take the batches as they are.
"""
