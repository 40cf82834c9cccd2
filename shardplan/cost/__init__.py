"""The cost of a training step of a planned model on one rank: traced without memory at a small depth, and extrapolated.

| file | what |
|---|---|
| ranks | a process group of any size in one process, and tensors without memory |
| meter | every storage, floating point operation and collective while a step runs |
| places | which module runs, forward and backward |
| trace | a step of a sharded model under the meter |
| ledger | what was measured, by phase and module: the peak of each and what it is made of |
| depth | the depths to trace, the model cut to one, and the line through two |
| devices | devices as data |
| bound | the least time of a step on a device |
| meshes | every mesh for a number of devices |
"""
