"""Names of the fields of a detection; the package of this file has no __init__.py."""

BOXES = "boxes"
