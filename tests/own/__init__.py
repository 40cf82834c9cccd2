"""Small models, each with a plan by hand: what `init` finds of what a hand can split."""
