"""Evaluation of detections. The package of the next import is not published."""

from vision.fair.slowfast.ava_evaluation import standard_fields

FIELDS = [standard_fields.BOXES]
