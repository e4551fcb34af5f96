"""Where attention goes, as pictures."""
