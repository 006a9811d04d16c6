"""Shows results: one module per verb, with tables for people and `as_dict` for JSON.

`fix`, `scan`, `verify`, `locate`, `compare_inputs` and `probe` print results. `terminal` and `json` hold what
they share, `checks`, `searched` and `frontier` are parts of them, `sarif` and `next_step` add other formats.
"""
