"""A trained model in use: loading it, predictions of videos, whole or as a stream."""
