"""Many models in one run, each in a process of its own, on this machine or on a Ray cluster.

`models` lists them and remembers what is finished, `machine` and `cluster` run several at a time.
"""
