"""The files a run leaves in OUTPUT_DIR: checkpoints, logs, results."""
