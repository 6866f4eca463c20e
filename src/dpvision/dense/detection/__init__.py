"""Object detection: Mask R-CNN on an encoder, scored by COCO's average precision."""
