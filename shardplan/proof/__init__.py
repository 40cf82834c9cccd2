"""The numeric proof: a reduced model, sharded, against the same model unsharded.

Importing this package does not import torch; using its files does.
"""
