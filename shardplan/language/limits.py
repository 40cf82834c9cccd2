"""How large a plan may be. Each limit is checked before the work that it limits."""

MAX_BYTES = 2**20  # of a file; a plan that lists every module of a 126-layer model by name has 0.1 MiB
MAX_DEPTH = 16  # of nested lists and mappings; the language needs 4
MAX_NODES = 100_000  # keys and values, counting what an alias repeats each time
MAX_ALTERNATIVES = 20_000  # of all patterns of one plan together
MAX_VALUES = 200  # of one option of a rule
MAX_FINDINGS = 200  # about one file, and of each stage about one plan for a model
MAX_ANCESTORS = 8  # plans that a plan extends, directly or through others
