"""Detection and segmentation with an encoder: non-private training on labelled images, scores,
contact sheets.

Only ``cli/evaluate_dense.py`` imports this package, for ``dpvision evaluate detection`` and
``dpvision evaluate segmentation``.
"""
