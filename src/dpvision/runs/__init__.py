"""Runs of any kind of training: folder, ledger, lineage, keys, checkpoints."""
