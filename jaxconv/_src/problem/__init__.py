"""A convolution as data: its window and axis orders, its epilogue, its operands."""
