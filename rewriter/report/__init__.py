"""Shows results: one module per verb, with a verdict, rows and tables for people, and `as_dict` for JSON.

`terminal` prints them, `html` makes a page of them, `json` and `sarif` are for programs. `checks`, `tables`
and `next_step` are parts of several.
"""
