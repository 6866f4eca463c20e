"""Audits of the mechanism that runs, on canaries (docs/audits.md)."""
