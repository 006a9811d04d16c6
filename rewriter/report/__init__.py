"""Shows results: one module per verb, with tables for people and `as_dict` for JSON.

`fix`, `scan`, `verify`, `locate`, `compare_inputs` and `probe` print results, and `runs` compares two.
`terminal` and `json` hold what they share, and `checks` is a part of them. `sarif`
and `next_step` add other formats; `html` makes a page of any result.
"""
