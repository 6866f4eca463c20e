"""Scores of encoders and captioners: probes on features (``probes``), tests of captions
(``captions``), detection and segmentation (``dense``), and the score itself.
"""
