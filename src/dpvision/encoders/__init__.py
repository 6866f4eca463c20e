"""Encoders of every origin behind one type, so that evaluations treat all of them the same way."""
