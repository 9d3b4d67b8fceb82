"""What programs have in common that run drawn trainings for hours: `fuzzing` and `unequal`.

`program.py` is the command line and the loop, `campaign.py` draws, counts and keeps failures,
`simplifying.py` makes those small, `planted.py` has faults to test the fuzzers with. `sweep.py` is
for lists that are run through once: `operators` and `architectures`.
"""
