"""The mechanism in torch: clipped sums, noise, and the gate that refuses models that cannot be
clipped per record.
"""
