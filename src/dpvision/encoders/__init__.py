"""Encoders of every origin behind one type, so that each evaluation treats all alike."""
