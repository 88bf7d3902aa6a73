"""What this machine can do by itself, and the share of it that a model gets.

`rates` measures the machine, `bounds` tells the least time that work can take at these rates, and
`share` runs a model beside them. `rksc doctor` and benchmarks/ stand on it.
"""
