"""The public functions: arguments checked and brought to a primitive's form."""
