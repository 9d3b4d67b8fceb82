"""Which tests find which faults: some that are planted by name, and random one-place changes.

`planted.py` has faults that this product has had, or would have if a guard went; `mutants.py` makes
random changes of the source. `running.py` runs tests on a copy of the source that has a fault,
`results.py` keeps what came of it. `python -m tests.kills --help` says how to run them; the last
results are in `found.json`, and what a survivor is, in `equal.py`.
"""
