"""Scores of encoders and captioners: probes on features (``probes``), tests of captions
(``captions``), and the score itself.
"""
