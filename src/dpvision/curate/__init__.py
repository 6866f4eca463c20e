"""Curation: from scraped pairs to a private store, by declared steps."""
