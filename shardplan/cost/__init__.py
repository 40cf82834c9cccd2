"""The cost of a training step of a planned model on one rank. A model with few layers is traced without memory, and the costs extrapolated.

| file | what |
|---|---|
| ranks | a process group of any size in one process, and tensors without memory |
| meter | every storage, floating-point operation and collective while a step runs |
| places | which module runs, forward and backward |
| trace | a step of a sharded model under the meter |
| ledger | the measurements by phase and module: each peak, and its categories |
| depth | the depths to trace, cutting the model to a depth, and the line through two depths |
| devices | devices as data |
| bound | the least time of a step on a device |
| meshes | every mesh for a number of devices |
"""
