"""From hazards to a plan: which nodes stay in FP32, and what that costs.

`planner` turns hazards into a plan, with `islands` that merge and FP32 where it is free (`free_fp32`).
`plan_file` and `plan_fit` read a plan back, `weak_typing` writes it for TensorRT 8 to 10, and `costs` has
its price.
"""
