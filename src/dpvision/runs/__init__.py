"""What a run is, whatever it trains: folder, ledger, lineage, keys, checkpoints."""
