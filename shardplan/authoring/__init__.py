"""Plans that are written by the package: from the run of a model, or from another project's plan."""
