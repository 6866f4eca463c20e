"""Curation of scraped images: declared steps of one record or across records, before training."""
