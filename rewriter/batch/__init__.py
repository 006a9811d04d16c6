"""Many models in one run: each in a process of its own, on this machine or on a Ray cluster.

`found` says which models there are, `child` fixes one, `local` and `cluster` run several at a time, `record`
remembers what is finished, and `run` puts them together. `summary`, `page` and `junit` report.
"""
