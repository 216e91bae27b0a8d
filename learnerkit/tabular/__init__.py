"""Tables: a pandas frame becomes two tensors (`data`), column by column (`columns`), for a network (`model`)."""
