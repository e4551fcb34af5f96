"""Looking: predictions of a video, trajectories of attention, the report of a run."""
