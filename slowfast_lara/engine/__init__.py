"""Training engine: launcher, rendezvous, training loop, tests and logging of a run."""
