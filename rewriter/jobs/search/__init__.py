"""Searches for plans from the rules' plan: the cheapest within a tolerance, the most accurate in a budget.

Candidates are evaluated by emulation and recorded costs.
"""
