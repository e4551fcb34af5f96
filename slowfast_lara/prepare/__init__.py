"""Before training: lists of videos, checking them, making a synthetic set."""
