"""Random models, trained on two ranks with DDP compiled and eager.

`spec.py` says what a case is, `strategies.py` draws cases, `blocks.py` and `building.py` make
modules of them, `training.py` and `checking.py` run them on the ranks, with what `loops.py` does
between two steps, `simplifying.py` leaves things out, `kept.py` keeps those that once failed.
`codes.py` compares what Inductor makes of backward sections with their graphs.
"""
