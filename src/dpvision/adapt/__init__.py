"""Private heads on frozen features. Every head is one or more releases of a clipped sum under one
plan (docs/heads.md).
"""
