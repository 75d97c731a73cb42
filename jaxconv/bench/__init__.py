"""Benchmarks: this library's kernels beside ``lax.conv`` on this machine.

``python -m jaxconv.bench --help`` lists the options.
"""
