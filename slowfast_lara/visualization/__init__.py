"""Pictures of attention: figures, videos and the demo page."""
