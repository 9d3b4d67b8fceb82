"""Trainings that are compared: in eager DDP, compiled by ddpopt, and compiled whole.

`running.py` runs one and judges it, `comparing.py` compares two, and `outcomes.py` has the words
for what comes of it. Random models of `fuzzing` and rows of `scenarios`, which are cases of the
same kind, loops of `unequal`, torch's own `operators` and `architectures` of libraries say what is
trained.
"""
