"""Finds epilogues, sums and pooling in programs written without them."""
