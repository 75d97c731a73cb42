"""Private implementation. The public names are those of the modules one level up."""
