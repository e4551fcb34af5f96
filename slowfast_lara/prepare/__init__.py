"""Dataset preparation: lists, video checks, transcoding, synthetic sets."""
