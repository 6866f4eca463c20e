"""What stands beside every score of an encoder: the same architecture with random weights, and the pixels themselves."""

from dpvision.encoders.fixed import PIXEL_SIDE, raw_pixels

__all__ = ["PIXEL_SIDE", "raw_pixels"]
