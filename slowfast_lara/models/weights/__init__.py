"""Reading of weight files, and loading of weights into a model."""
