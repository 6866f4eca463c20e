"""Trained models in other programs' formats: what leaves a run, a file for each format."""
