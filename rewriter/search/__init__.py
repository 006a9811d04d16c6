"""Searches for plans: the cheapest within a tolerance, the most accurate within a budget, the fastest.

A search starts from the rules' plan. Without a GPU, `cheapest` and `within` evaluate candidates by emulation
and recorded costs. With a GPU, `rounds` builds and runs candidates made of `fp32_groups`.
"""
