"""Fault injection: small trainings and tests under random faults, drawn from one seed.

python -m tests.torture --seed 1 --minutes 60

An experiment is one output folder. Runs start in it one after another, and faults are injected
into each: processes killed or suspended, full disks, damaged files. After each run, `checks`
verifies how it ended. The last run is undisturbed and must end with the weights and scores of an
undisturbed reference run, to the bit.
"""
