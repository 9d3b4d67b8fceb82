"""Random training loops of three ranks that differ, with DDP compiled and eager.

`script.py` says what a script is (a model, options, and what the loop does), `actions.py` what a
loop may do, `machine.py` draws scripts by rules. `models.py` and `twin.py` make what trains,
`performing.py` does the actions, `running.py` runs a script on the ranks, once eagerly and once
compiled, and `judging.py` says what came of it. `simplifying.py` leaves things out, `kept.py` keeps
those that once failed.
"""
