"""Whether the package works with a pair of releases of torch and transformers."""
