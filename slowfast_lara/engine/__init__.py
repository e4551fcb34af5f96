"""Running: launch, train, evaluate, checkpoints, and what a run leaves behind."""
