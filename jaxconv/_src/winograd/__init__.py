"""Filters prepared for Winograd, and the primitive that reads them."""
