"""The numeric proof: compares a sharded reduced model with the same model unsharded.

Importing this package does not import torch; using its files does.
"""
