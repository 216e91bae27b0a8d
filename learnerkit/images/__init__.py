"""Images: reading files, augmenting batches, and loaders made of both. `learnerkit.vision` has the networks.

`reading.py` makes a tensor of a picture, `augmentation.py` changes whole batches, `data.py` says which pictures are
read.
"""
