"""Dataset preparation: lists, video checks, transcoding, synthetic datasets."""
