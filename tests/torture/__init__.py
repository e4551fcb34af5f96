"""A standing attack: small trainings and tests under random faults, drawn from one seed.

python -m tests.torture --seed 1 --minutes 60

An experiment is one output folder. Runs are started in it, one after the other, and each is
attacked: killed, stopped, starved, given damaged files. After each, `checks` look whether it
ended as it should. At last the experiment is left alone, and has to end with the weights and
scores of the reference, which nobody disturbed, to the bit.
"""
