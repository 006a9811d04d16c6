"""Searches for plans: the cheapest that is accurate enough, the most accurate in a budget, the fastest.

A search starts from the rules' plan. Without a GPU, `cheapest` and `within` judge candidates node by node, by
emulation and recorded costs. With a GPU, `rounds` builds and runs candidates made of `groups` of nodes.
"""
