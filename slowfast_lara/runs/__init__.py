"""Files of a run in OUTPUT_DIR: checkpoints, saved config, logs, results."""
