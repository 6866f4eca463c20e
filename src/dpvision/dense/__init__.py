"""Detection and segmentation with an encoder: non-private training on labelled images, scores,
contact sheets.

Nothing imports this package; ``dpvision evaluate detection`` and ``dpvision evaluate segmentation``
load it when called.
"""
