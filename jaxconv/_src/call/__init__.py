"""From a primitive to its kernel: selection, lowering, and the record of both."""
