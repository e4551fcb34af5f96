"""Inference: load a trained model, predict videos and streams, export."""
