"""What attention variants with an indexer share: placement of tokens, recomputed passes, the indexer's loss."""
