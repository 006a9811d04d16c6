"""From hazards to a plan: which nodes stay in FP32.

`planner` turns hazards into a plan, with islands that merge and FP32 where it is free (`free_fp32`), and
fits saved plans to a model.
"""
