"""Many models in one run, each in a process of its own, on this machine or on a Ray cluster.

`models` lists them, `machine` and `cluster` run several at a time, `state` remembers what is finished.
"""
