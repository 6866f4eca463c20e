"""Tests of a captioner: zero-shot classification, choices between captions, CIDEr."""
