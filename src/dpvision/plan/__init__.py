"""What to do with given images, people and machines: for ``dpvision plan``, before anything is
imported that is slow.
"""
