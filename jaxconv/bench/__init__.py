"""Benchmarks: this library's kernels beside ``lax.conv`` on this machine, by layers or networks.

``python -m jaxconv.bench --help`` lists the options for layers, and ``python -m jaxconv.bench
--network --help`` those for networks.
"""
