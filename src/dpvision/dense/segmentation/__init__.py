"""Semantic segmentation: UPerNet on an encoder, scored by mean intersection over union."""
