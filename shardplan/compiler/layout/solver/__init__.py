"""The solver: rules that split the matrices of a block, from the unsharded run. `init` writes them; the help of a finding is their difference to
the plan's."""
