"""Finding epilogues, sums and pooling in programs that do not know them."""
